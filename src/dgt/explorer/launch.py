"""`dgt explore`: find a model (given, the demo's, or one trained for a minute), collect images, serve the page."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from pathlib import Path

import uvicorn

from dgt.explorer.album import Album, image_files
from dgt.explorer.server import LOOPBACK, create_app
from dgt.explorer.views import Explorer
from dgt.training import LoadedRun, fit, load_recipe, load_run
from dgt.utils.atomic_write import replacing
from dgt.utils.errors import UserError

DEMO = Path("runs/demo")
OWN = Path("runs/explore")
EPOCHS = 4


def serve(
    checkpoint: str | Path | None = None, image: str | Path | None = None, host: str = "127.0.0.1", port: int = 7860
) -> None:
    """Serve the page until interrupted.

    Args:
        checkpoint: as `find_run` takes it.
        image: an image file, or a folder of them, to show besides the built-in scenes.
        host: address to listen on; anything but a loopback address lets others in.
        port: TCP port; 0 for any free one.

    Raises:
        FileNotFoundError, ValueError: as `load_run`, `image_files` and `Explorer` do; a port out of range or in use.
    """
    if not 0 <= port <= 65535:
        raise UserError(f"port must lie in 0 to 65535, got {port}")
    album = Album([] if image is None else image_files(image))
    with listen(host, port) as listener:
        run = find_run(checkpoint)
        explorer = Explorer(run, album)
        explorer.warm_up()
        address = f"{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        print(f"{run.recipe.model.name} from {run.source}\nopen http://{address}/  (Ctrl-C ends it)", flush=True)
        local = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        if not local:
            print(f"listening on {host}: whoever reaches this machine can use the page", flush=True)
        app = create_app(explorer, [*LOOPBACK, host] if local else ["*"])
        config = uvicorn.Config(app, log_level="warning", server_header=False, limit_concurrency=64)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn has shut down in order, and passes it on
            uvicorn.Server(config).run(sockets=[listener])


def find_run(checkpoint: str | Path | None) -> LoadedRun:
    """The model to show: the given one, else the demo's, else one kept from an earlier call, else a new one.

    `checkpoint` is a checkpoint, run folder or model folder, or None; errors as `load_run`.
    """
    if checkpoint is not None:
        return load_run(checkpoint)
    for folder in (DEMO, OWN):
        if (folder / "model" / "model.safetensors").is_file():
            return load_run(folder)
    print(
        f"no checkpoint given and no demo in {DEMO}: training dgt_nano on the built-in scenes for about a minute\n"
        f"(kept in {OWN}; `dgt demo` trains it longer)",
        flush=True,
    )
    return load_run(train(OWN))


def train(folder: Path, epochs: int = EPOCHS) -> Path:
    """Train the nano model on the scenes for a short time; return `folder`, which appears whole or not at all."""
    with replacing(folder) as partial:
        fit(load_recipe("scenes", ["--name", folder.name, "--out", str(partial), "--schedule.epochs", str(epochs)]))
    return folder


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens before any model is loaded: a port in use is told at once, and who comes early waits.

    Raises UserError where the address cannot be bound, and why.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
