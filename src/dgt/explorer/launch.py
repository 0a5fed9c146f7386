"""`dgt explore`: find a model (given, the newest run's, or the shipped one), collect images, serve
the page.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from pathlib import Path

import uvicorn

from dgt.explorer.album import Album, image_files
from dgt.explorer.server import LOOPBACK, create_app
from dgt.explorer.static_page import check_folder, export_page
from dgt.explorer.views import Explorer, shown_blocks
from dgt.runs import LoadedRun, load_run
from dgt.utils.errors import UserError
from dgt.weights import default_models


def serve(
    checkpoint: str | Path | None = None,
    image: str | Path | None = None,
    host: str = "127.0.0.1",
    port: int = 7860,
) -> None:
    """Serve the page until interrupted.

    Args:
        checkpoint: as `find_run` takes it.
        image: an image file, or a folder of them, to show besides the built-in scenes.
        host: address to listen on; anything but a loopback address lets others in.
        port: TCP port; 0 for any free one.

    Raises:
        UserError, OSError: as `load_run`, `image_files` and `Explorer`.
        UserError: the port is out of range or in use.

    Example:
        >>> serve("runs/scenes", port=0)  # prints the address
    """
    if not 0 <= port <= 65535:
        raise UserError(f"port must lie in 0 to 65535, got {port}")
    files = [] if image is None else image_files(image)
    with listen(host, port) as listener:
        run = find_run(checkpoint, photographs=image is not None)
        explorer = Explorer(run, Album(files, bits=run.recipe.data.bits))
        explorer.warm_up()
        address = f"{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        print(
            f"{run.recipe.model.name} from {run.source}\nopen http://{address}/  (Ctrl-C to stop)",
            flush=True,
        )
        local = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        if not local:
            print(
                f"listening on {host}: anyone who can reach this machine can use the page",
                flush=True,
            )
        app = create_app(explorer, [*LOOPBACK, host] if local else ["*"])
        config = uvicorn.Config(app, log_level="warning", server_header=False, limit_concurrency=64)
        # uvicorn has shut down in order, and passes it on
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def export(
    folder: str | Path, checkpoint: str | Path | None = None, image: str | Path | None = None
) -> str:
    """Write the page as static files for any web server.

    Args:
        folder: to write.
        checkpoint: as `find_run` takes it.
        image: an image file, or a folder of them; None for the built-in scenes.

    Returns:
        A message about what was written.

    Raises:
        UserError, OSError: as `serve` and `export_page`.

    Example:
        >>> print(export("page", "runs/scenes"))
    """
    check_folder(Path(folder))
    files = [] if image is None else image_files(image)
    run = find_run(checkpoint, photographs=image is not None)
    album = Album(files, scenes=image is None, bits=run.recipe.data.bits)
    explorer = Explorer(run, album)
    size = export_page(explorer, folder)
    return f"{Path(folder) / 'index.html'}  {len(album.names())} images, {size / 2**20:.1f} MiB"


def find_run(checkpoint: str | Path | None, photographs: bool) -> LoadedRun:
    """The model to show: the given one, else that of the newest run in `runs/` with groups to show,
    else the included one for the images.

    Args:
        checkpoint: as `load_run` takes it, or None; errors as there.
        photographs: whether images are shown, or only the built-in scenes.
    """
    if checkpoint is not None:
        return load_run(checkpoint)
    included = "dgt_nano.imagenette" if photographs else "dgt_nano.scenes"
    candidates = ((load_run(folder), line) for folder, line in default_models(shipped=included))
    run, line = next((run, line) for run, line in candidates if shown_blocks(run.network))
    print(line, flush=True)
    return run


def listen(host: str, port: int) -> socket.socket:
    """Open a socket before any model is loaded: a port in use is reported at once, and early visitors
    wait.

    Args:
        host: address.
        port: TCP port; 0 for any free one.

    Raises:
        UserError: the address cannot be bound; the message says why.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except (OSError, UnicodeError) as error:
        # for an invalid name, for example with a label of more than 63 characters
        raise UserError(
            f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}"
        ) from error
