"""The server: its answers are what the operator returned; hostile requests get an error and change nothing."""

from __future__ import annotations

import base64
import copy
import io
import os
import random
import socket
import struct
import time
import zipfile
import zlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import httpx
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from numpy.typing import NDArray
from PIL import Image

import dgt
from dgt.explorer import Album, Explorer, create_app
from dgt.explorer.album import MAX_UPLOADS, RefusedError, decode_upload
from dgt.ops.attention_mass import attention_mass

PNG_TYPE = {"content-type": "image/png"}


def unpack(text: str, kind: str, *shape: int) -> NDArray[np.generic]:
    return np.frombuffer(base64.b64decode(text), kind).reshape(shape)


def image_bytes(size: tuple[int, int] = (90, 60), form: str = "PNG", mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise(size, 80).convert(mode).save(buffer, form)
    return buffer.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_header(width: int, height: int) -> bytes:
    """A PNG that declares any size but has only a few bytes: a decompression bomb."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("size", "block", "head", "k"), [(64, 0, 0, 32), (64, 1, 1, 7), (128, 2, 3, 64), (64, 5, 2, 1)]
)
def test_a_view_is_what_the_operator_returned(
    explorer: Explorer, client: TestClient, size: int, block: int, head: int, k: int
) -> None:
    view = client.get(f"/api/view?image=scene-1&size={size}&block={block}&head={head}&k={k}").json()
    network = explorer.run.network
    seen: list[torch.Tensor] = []
    layer = [module for module in network.modules() if isinstance(module, dgt.DGAttention)][block]
    hook = layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    with torch.no_grad():
        network(explorer.pixels("scene-1", size))
        hook.remove()
        query, key, value = layer.split_heads(seen[0])
        found = dgt.dynamic_group_attention(
            query, key, value, layer.unit_centroids(), k, layer.scale
        )
    rows, columns = view["grid"]
    tokens, keys = rows * columns, view["k"]
    assert (rows, columns) == seen[0].shape[1:3]
    assert keys == min(k, tokens)
    groups = unpack(view["group_ids"], "<u2", tokens)
    key_ids = unpack(view["key_ids"], "<u2", view["groups"], keys)
    np.testing.assert_array_equal(groups, found.group_ids[0, head])
    np.testing.assert_array_equal(key_ids, found.key_ids[0, head])
    mass = attention_mass(query, key, found.group_ids, found.key_ids, layer.scale)[0, head]
    np.testing.assert_allclose(unpack(view["mass"], "<f4", tokens), mass, rtol=1e-4)
    # The weights, rounded to bytes, reproduce the operator's output for the head.
    weights = (
        unpack(view["weights"], "u1", tokens, keys)
        / 255.0
        * unpack(view["peaks"], "<f4", tokens, 1)
    )
    output = np.einsum("lk,lkd->ld", weights, value[0, head].numpy()[key_ids[groups]])
    worst = np.abs(value[0, head].numpy()).max() * keys / 255 / 2 * weights.max() + 1e-5
    np.testing.assert_allclose(output, found.output[0, head], atol=worst)


def test_a_view_says_what_goes_to_residual_keys(explorer: Explorer, client: TestClient) -> None:
    query = "/api/view?image=scene-1&size=64&block=0&head=0&k=32"
    assert client.get(query).json()["residual"] is None
    run = copy.deepcopy(explorer.run)
    dgt.set_attention(run.network, residual_keys=2)
    other = Explorer(run, Album())
    client = TestClient(create_app(other), base_url="http://127.0.0.1:7860")
    assert client.get("/api/model").json()["blocks"][0]["residual_keys"] == 2
    expected = dgt.group_records(run.network, other.pixels("scene-1", 64))[0].residual_share
    found = unpack(client.get(query).json()["residual"], "<f4", 256)
    np.testing.assert_allclose(found, expected[0, 0], rtol=1e-5)
    assert 0 < found.min() < found.max() < 1


def test_a_view_at_the_models_own_k_is_what_the_model_did(
    explorer: Explorer, client: TestClient
) -> None:
    records = dgt.group_records(explorer.run.network, explorer.pixels("scene-0", 64))
    assert len(records) == len(client.get("/api/model").json()["blocks"])
    for block, record in enumerate(records):
        for head in range(record.attention.group_ids.shape[1]):
            view = client.get(
                f"/api/view?image=scene-0&size=64&block={block}&head={head}&k=32"
            ).json()
            assert tuple(view["grid"]) == record.grid
            tokens = record.grid[0] * record.grid[1]
            np.testing.assert_array_equal(
                unpack(view["group_ids"], "<u2", tokens), record.attention.group_ids[0, head]
            )
            np.testing.assert_array_equal(
                unpack(view["key_ids"], "<u2", view["groups"], view["k"]),
                record.attention.key_ids[0, head],
            )


def test_it_opens_at_the_size_the_model_was_trained_at(
    explorer: Explorer, client: TestClient
) -> None:
    """At 128 px the demo's model, trained at 64 px, calls a star a triangle: shapes have another scale."""
    model = client.get("/api/model").json()
    assert model["size"] == explorer.run.recipe.data.image_size == 64
    assert model["sizes"] == [64, 128, 224]


def test_the_curve_ends_at_all_keys_and_agrees_with_the_view(client: TestClient) -> None:
    curve = client.get("/api/curve?image=scene-0&size=64&block=0&head=0").json()
    assert curve["counts"][0] == 1
    assert curve["counts"][-1] == 256
    assert curve["mass"][-1] == pytest.approx(1)
    view = client.get(
        f"/api/view?image=scene-0&size=64&block=0&head=0&k={curve['counts'][9]}"
    ).json()
    assert unpack(view["mass"], "<f4", 256).mean() == pytest.approx(curve["mass"][9], abs=2e-5)


@pytest.mark.parametrize(
    "query",
    [
        "image=scene-99&size=64&block=0&head=0&k=5",
        "image=../../etc/passwd&size=64&block=0&head=0&k=5",
        "image=scene-0&size=9999999&block=0&head=0&k=5",
        "image=scene-0&size=64&block=99&head=0&k=5",
        "image=scene-0&size=64&block=-1&head=0&k=5",
        "image=scene-0&size=64&block=0&head=7&k=5",
        "image=scene-0&size=64&block=0&head=0&k=0",
        "image=scene-0&size=64&block=0&head=0&k=many",
        "image=scene-0",
    ],
)
def test_wrong_questions_get_a_sentence(client: TestClient, query: str) -> None:
    answer = client.get(f"/api/view?{query}")
    assert answer.status_code in (404, 422)
    assert len(answer.json()["error"]) > 10


def test_a_huge_k_is_held_to_the_tokens_and_to_what_an_answer_may_hold(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.get("/api/view?image=scene-0&size=64&block=1&head=0&k=1000000").json()["k"] == 64
    monkeypatch.setattr("dgt.explorer.views.MAX_KEYS", 40)
    assert client.get("/api/view?image=scene-0&size=64&block=0&head=0&k=1000000").json()["k"] == 40
    monkeypatch.setattr("dgt.explorer.views.MAX_WEIGHTS", 12 * 256)
    assert client.get("/api/view?image=scene-0&size=64&block=0&head=0&k=999999").json()["k"] == 12


def hostile() -> list[tuple[str, bytes, str]]:
    """A hundred uploads that are not images, by kind: name, bytes, and declared type."""
    random_bytes = random.Random(0).randbytes
    whole = {form: image_bytes(form=form) for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP")}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("../../evil.png", whole["PNG"])
    svg = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    html = b"<!doctype html><script>alert(1)</script>"
    found = []
    for form in ("PNG", "JPEG", "GIF", "WEBP"):
        data, kind = whole[form], f"image/{form.lower()}"
        found += [
            (f"truncated {form}", data[: len(data) * part // 12], kind) for part in range(1, 9)
        ]
    found += [("cut BMP", whole["BMP"][:40], "image/bmp")]
    found += [("huge header", png_header(2**n, 2**n), "image/png") for n in range(13, 31)]
    found += [("thin", png_header(2**n, 1), "image/png") for n in range(10, 20)]
    for kind in ("image/png", "image/svg+xml", "application/octet-stream"):
        found += [
            ("SVG", svg, kind),
            ("zip", archive.getvalue(), kind),
            ("HTML", html, kind),
            ("empty", b"", kind),
        ]
        found += [
            ("script", b"#!/bin/sh\ntouch hacked\n", kind),
            ("noise", random_bytes(5000), kind),
        ]
    for kind in ("text/html", "application/json", "multipart/form-data; boundary=x", ""):
        found += [("wrong type", whole["PNG"], kind), ("HTML", html, kind)]
    for form in ("TIFF", "ICO", "PPM", "PDF", "TGA"):
        found += [(f"other format {form}", image_bytes(form=form), "image/png")]
    for offset in range(8):  # a whole image with a broken middle
        damaged = bytearray(whole["PNG"])
        damaged[200 + 100 * offset : 240 + 100 * offset] = random_bytes(40)
        found += [("damaged", bytes(damaged), "image/png")]
    return found


def test_a_hundred_hostile_uploads_leave_it_serving(client: TestClient, tmp_path: Path) -> None:
    uploads = hostile()
    assert len(uploads) >= 100
    before = client.get("/api/images").json()
    home = os.getcwd()
    os.chdir(tmp_path)  # anything written to a relative path would appear here
    try:
        for name, data, kind in uploads:
            answer = client.post("/api/images", content=data, headers={"content-type": kind})
            assert answer.status_code in (413, 415), (name, kind, answer.text)
            assert answer.json()["error"].endswith("."), name
            assert "Error" not in answer.text, name
    finally:
        os.chdir(home)
    assert os.listdir(tmp_path) == []
    assert client.get("/api/images").json() == before
    assert client.post("/api/images", content=image_bytes(), headers=PNG_TYPE).status_code == 200
    assert client.get("/api/view?image=scene-0&size=64&block=0&head=0&k=5").status_code == 200


def test_too_many_bytes_are_refused_unread(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgt.explorer.server.MAX_BYTES", 1000)
    small, sent = create_app(explorer), list[int]()

    async def endless() -> AsyncIterator[bytes]:
        for number in range(100):
            sent.append(number)
            yield bytes(500)

    async def stream() -> httpx.Response:  # no length announced
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(small), base_url="http://127.0.0.1"
        ) as opened:
            return await opened.post("/api/images", content=endless(), headers=PNG_TYPE)

    client = TestClient(small, base_url="http://127.0.0.1")
    # Announced.
    assert client.post("/api/images", content=bytes(1001), headers=PNG_TYPE).status_code == 413
    streamed = anyio.run(stream)
    assert streamed.status_code == 413
    assert "too large" in streamed.json()["error"]
    assert len(sent) < 10


def test_an_upload_that_stalls_is_given_up(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgt.explorer.server.UPLOAD_SECONDS", 0.2)
    host, _, port = address.removeprefix("http://").rstrip("/").partition(":")
    head = "POST /api/images HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 99\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=200) as opened:
        opened.sendall(head.encode() + b"half")
        answer = opened.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"The upload took too long." in answer


def test_a_large_image_is_kept_no_larger_than_any_page_shows() -> None:
    assert decode_upload(image_bytes((3000, 1500))).size == (1024, 512)


def test_a_file_whose_name_is_no_utf8_is_shown(explorer: Explorer, tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png")
    Path(path).write_bytes(image_bytes())
    app = create_app(Explorer(explorer.run, Album([path], scenes=False)), ["testserver"])
    shown = TestClient(app).get("/api/images").json()["images"]
    assert shown == [{"id": "file-0", "title": r"caf\udce9.png"}]


def test_gray_has_the_bits_of_the_recipe(tmp_path: Path) -> None:
    """As in predictions: files and uploads."""
    values = np.linspace(0, 4095, 64).astype(np.uint16).reshape(8, 8)
    file = tmp_path / "camera.png"
    Image.fromarray(values).save(file)
    for bits, brightest in ((12, 255), (None, 15)):
        album = Album([file], scenes=False, bits=bits)
        for key in ("file-0", album.add(file.read_bytes())):
            assert album.image(key).getextrema() == 3 * ((0, brightest),)


def test_pixels_are_limited_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", never)
    for side, words in ((7000, "7000 x 7000 pixels"), (40000, "far too many pixels")):
        with pytest.raises(RefusedError, match=words):
            decode_upload(png_header(side, side))
    scan = b"\xff\xda\x00\x08\x01\x01\x00\x00\x00\x00"
    with pytest.raises(RefusedError, match="That JPEG has 1001 scans; the limit is 100"):
        decode_upload(image_bytes(form="JPEG")[:-2] + 1000 * scan + b"\xff\xd9")


def test_uploads_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they could need the memory of many images of forty million pixels."""
    inside, most = list[bytes](), list[int]()

    def decode(data: bytes, _: int | None) -> Image.Image:
        inside.append(data)
        time.sleep(0.05)  # gives the others time to arrive
        most.append(len(inside))
        inside.remove(data)
        return Image.new("RGB", (8, 8))

    monkeypatch.setattr("dgt.explorer.album.decode_upload", decode)
    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(Album(scenes=False).add, (b"a", b"b", b"c", b"d")))) == 4
    assert most == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("form", "mode"),
    [("PNG", "RGBA"), ("PNG", "I;16"), ("JPEG", "CMYK"), ("GIF", "P"), ("WEBP", "RGB")],
)
def test_good_images_are_taken(client: TestClient, form: str, mode: str) -> None:
    data = image_bytes((300, 200), form, mode)
    answer = client.post(
        "/api/images", content=data, headers={"content-type": "application/octet-stream"}
    )
    assert answer.status_code == 200, answer.text
    key = answer.json()["id"]
    assert client.post("/api/images", content=data, headers=PNG_TYPE).json()["id"] == key
    view = client.get(f"/api/view?image={key}&size=64&block=0&head=0&k=8").json()
    assert view["grid"][1] > view["grid"][0]
    with Image.open(io.BytesIO(client.get(f"/api/images/{key}?size=64").content)) as shown:
        rows, columns = view["grid"]
        assert shown.width / shown.height == pytest.approx(columns / rows, rel=0.02)


def test_uploads_make_room_and_then_are_gone(explorer: Explorer) -> None:
    album = Album()
    keys = [album.add(image_bytes((40 + number, 40))) for number in range(MAX_UPLOADS + 1)]
    client = TestClient(create_app(Explorer(explorer.run, album)), base_url="http://localhost")
    assert client.get(f"/api/images/{keys[0]}?size=64").status_code == 404
    assert client.get(f"/api/images/{keys[-1]}?size=64").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/explorer.css/../server.py",
        "/static/explorer.js",
        "/%2e%2e/server.py",
        "/etc/passwd",
        "/docs",
    ],
)
def test_nothing_but_the_page_is_served(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "error" in answer.json()


def test_another_sites_names_are_refused(explorer: Explorer) -> None:
    app = create_app(explorer)
    assert TestClient(app, base_url="http://evil.example").get("/api/model").status_code == 400
    assert TestClient(app, base_url="http://localhost:7860").get("/api/model").status_code == 200


def test_the_page_asks_for_nothing_outside(client: TestClient) -> None:
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    for name in (
        "",
        "explorer.css",
        "explorer.js",
        "painter.js",
        "charts.js",
        "server.js",
        "icon.svg",
    ):
        answer = client.get(f"/{name}")
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "//" not in answer.text.replace("http://www.w3.org/2000/svg", "").replace(
            "// ", ""
        ), name


def test_broken_metadata_of_an_upload_cost_nothing() -> None:
    whole = image_bytes()
    broken = whole[:33] + chunk(b"iCCP", b"a\0\0no zlib") + whole[33:]
    assert decode_upload(broken).tobytes() == decode_upload(whole).tobytes()


@pytest.mark.parametrize("make", [lambda folder: folder, lambda folder: folder / "b.png"])
def test_files_of_the_user_come_first(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    from dgt.explorer.album import image_files

    (tmp_path / "a").mkdir()
    for name in ("b.png", "a.txt", "a/a.png"):
        (tmp_path / name).write_bytes(image_bytes())
    album = Album(image_files(make(tmp_path)))
    assert [title for key, title in album.names() if key.startswith("file-")] == ["b.png"]
    (tmp_path / "b.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"b\.png' cannot be read as an image"):
        Album(image_files(make(tmp_path)))
