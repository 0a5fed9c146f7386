"""The server of the explorer page: fixed files of the page, images by id, answers as JSON, and an
endpoint for uploads.

It is meant for the machine it runs on. What comes from outside is held to limits before it is
looked at: the host that a request names (so that no other site's page can reach it by DNS
rebinding), the type and bytes of an upload, the seconds it may take. No request names a file but
those of the page, in `static`.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import anyio
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from dgt.explorer.album import LONG_SIDE, MAX_BYTES, RefusedError, encode_jpeg
from dgt.explorer.views import Answer, Explorer
from dgt.utils.errors import UserError

mimetypes.add_type("text/javascript", ".js")  # Windows may say text/plain, which no browser runs
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
UPLOAD_SECONDS = 30.0
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def create_app(explorer: Explorer, hosts: Sequence[str] = LOOPBACK) -> FastAPI:
    """The web application around a model and its images.

    Args:
        explorer: answers the page's questions.
        hosts: host names under which the page may be requested; `["*"]` for any.

    Returns:
        An application for any ASGI server.

    Example:
        >>> uvicorn.run(create_app(Explorer(load_run("runs/scenes"), Album())))
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    _answer_errors(app)
    album = explorer.album

    @app.get("/api/model")
    def model() -> Answer:
        return explorer.describe()

    @app.get("/api/view")
    def view(image: str, size: int, block: int, head: int, k: int) -> Answer:
        return explorer.view(image, size, block, head, k)

    @app.get("/api/curve")
    def curve(image: str, size: int, block: int, head: int) -> Answer:
        return explorer.curve(image, size, block, head)

    @app.get("/api/images")
    def images() -> Answer:
        return {"images": [{"id": key, "title": title} for key, title in album.names()]}

    @app.get("/api/images/{key}")
    def image(
        key: str, size: int, side: Annotated[int, Query(ge=16, le=LONG_SIDE)] = LONG_SIDE
    ) -> Response:
        if size not in explorer.sizes:
            raise UserError("Missing or malformed: size.")
        return Response(
            encode_jpeg(album.image(key), size, explorer.step, side), media_type="image/jpeg"
        )

    @app.post("/api/images")
    async def upload(request: Request) -> Answer:
        key = await run_in_threadpool(album.add, await _read_upload(request))
        return {"id": key, "title": "your image"}

    app.mount("/", StaticFiles(packages=[("dgt.explorer", "static")], html=True))
    return app


def _answer_errors(app: FastAPI) -> None:
    """Add headers to every response, and a message under "error" to every rejection."""

    @app.middleware("http")
    async def add_headers(
        request: Request, answer: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        response = await answer(request)
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(HTTPException)
    @app.exception_handler(RequestValidationError)
    @app.exception_handler(RefusedError)
    @app.exception_handler(ValueError)
    async def refused(_: Request, error: Exception) -> JSONResponse:
        sentence = str(getattr(error, "detail", error))
        if isinstance(error, RequestValidationError):
            names = sorted({str(problem["loc"][-1]) for problem in error.errors()})
            sentence = f"Missing or malformed: {', '.join(names)}."
        return JSONResponse({"error": sentence}, getattr(error, "status_code", 422))


async def _read_upload(request: Request) -> bytes:
    """The body of an upload, read no further than the limit.

    Other sites' pages can send no such type without asking first, and are then refused by the
    browser.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (kind.startswith("image/") or kind == "application/octet-stream"):
        raise RefusedError("That is not an image: use JPEG, PNG, WebP, GIF or BMP.")
    too_large = RefusedError(
        f"That file is too large: the limit is {MAX_BYTES / 2**20:.0f} MB.", 413
    )
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced) > MAX_BYTES:
        raise too_large
    body = bytearray()
    try:
        with anyio.fail_after(UPLOAD_SECONDS):
            async for chunk in request.stream():
                body.extend(chunk)
                if len(body) > MAX_BYTES:
                    raise too_large
    except TimeoutError:
        raise RefusedError("The upload took too long.", 408) from None
    return bytes(body)
