"""The server of the explorer page: fixed files of the page, pictures by id, answers as JSON, and a door for uploads.

It is meant for the machine it runs on. What comes from outside is held to limits before it is looked at: the host that
a request names (so that no other site's page can reach it by a trick with names), the type and bytes of an upload, the
seconds it may take. No request names a file: the page's own files are read once, at the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from dgt.explorer.album import (
    LONG_SIDE,
    MAX_BYTES,
    RefusedUploadError,
    UnknownPictureError,
    crop,
    encode_jpeg,
    fit_sides,
)
from dgt.explorer.views import Answer, Explorer

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
UPLOAD_SECONDS = 30.0
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def create_app(explorer: Explorer, hosts: Sequence[str] = LOOPBACK, max_bytes: int = MAX_BYTES) -> FastAPI:
    """The web application around a model and its pictures.

    Args:
        explorer: the model and the pictures.
        hosts: names under which it may be addressed; `["*"]` for any.
        max_bytes: the largest upload.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    _answer_errors(app)
    _serve_page(app)
    _serve_pictures(app, explorer, max_bytes)

    @app.get("/api/model")
    def model() -> Answer:
        return explorer.describe()

    @app.get("/api/view")
    def view(image: str, size: int, block: int, head: int, k: int) -> JSONResponse:
        return JSONResponse(explorer.view(image, size, block, head, k))

    @app.get("/api/curve")
    def curve(image: str, size: int, block: int, head: int) -> JSONResponse:
        return JSONResponse(explorer.curve(image, size, block, head))

    return app


def _answer_errors(app: FastAPI) -> None:
    """Headers on every answer, and a sentence under "error" with every refusal."""

    @app.middleware("http")
    async def add_headers(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await answer(request)
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        names = sorted({str(problem["loc"][-1]) for problem in error.errors()})
        return JSONResponse({"error": f"Missing or malformed: {', '.join(names)}."}, 422)

    @app.exception_handler(UnknownPictureError)
    async def unknown(_: Request, __: UnknownPictureError) -> JSONResponse:
        return JSONResponse({"error": "That picture is not here (any more): drop it again, or choose another."}, 404)

    @app.exception_handler(ValueError)
    async def out_of_range(_: Request, error: ValueError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 422)


def _serve_page(app: FastAPI) -> None:
    """The files of `static`, each under its own name, and `index.html` as the root."""

    def serve(route: str, body: bytes, kind: str) -> None:
        app.add_api_route(route, lambda: Response(body, media_type=kind), include_in_schema=False)

    for file in files("dgt.explorer").joinpath("static").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in TYPES:
            serve("/" if file.name == "index.html" else f"/{file.name}", file.read_bytes(), TYPES[suffix])


def _serve_pictures(app: FastAPI, explorer: Explorer, max_bytes: int) -> None:
    album = explorer.album

    @app.get("/api/images")
    def images() -> Answer:
        return {"images": [{"id": key, "title": title} for key, title in album.names()]}

    @app.get("/api/images/{key}")
    def image(key: str, size: int, side: int = LONG_SIDE) -> Response:
        if size not in explorer.sizes or not 16 <= side <= LONG_SIDE:
            raise HTTPException(422, "Missing or malformed: size, side.")
        picture = album.picture(key)
        sides = fit_sides((picture.height, picture.width), size, explorer.step)
        return Response(encode_jpeg(crop(picture, sides), side), media_type="image/jpeg")

    @app.post("/api/images")
    async def upload(request: Request) -> Answer:
        data = await _read_upload(request, max_bytes)
        try:
            key = await run_in_threadpool(album.add, data)
        except RefusedUploadError as error:
            raise HTTPException(415, str(error)) from None
        except MemoryError:
            raise HTTPException(413, "That picture is too large for the memory left.") from None
        return {"id": key, "title": "your picture"}


async def _read_upload(request: Request, max_bytes: int) -> bytes:
    """The body of an upload, read no further than the limit.

    Other sites' pages can send no such type without asking first, and are then refused by the browser.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (kind.startswith("image/") or kind == "application/octet-stream"):
        raise HTTPException(415, "That is not a picture: JPEG, PNG, WebP, GIF and BMP are taken.")
    too_large = HTTPException(413, f"That file is too large: at most {max_bytes / 2**20:.0f} MB are taken.")
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced) > max_bytes:
        raise too_large
    body = bytearray()

    async def read() -> None:
        async for chunk in request.stream():
            body.extend(chunk)
            if len(body) > max_bytes:
                raise too_large

    try:
        await asyncio.wait_for(read(), UPLOAD_SECONDS)
    except asyncio.TimeoutError:
        raise HTTPException(408, "The upload took too long.") from None
    return bytes(body)
