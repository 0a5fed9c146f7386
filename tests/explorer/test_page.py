"""The page in a headless Chromium: load, change block, hover, pin, drop, change k, save; fast, without a network."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

READY = (
    "window.explorer && explorer.now.view && explorer.now.curve && !document.querySelector('.busy')"
)


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A freshly loaded page; afterwards there must be no errors and no requests to other hosts."""
    browser.errors.clear()
    browser.requests.clear()
    browser.run("try { localStorage.clear() } catch {}")
    browser.open(address)
    browser.wait(READY)
    yield browser
    assert browser.errors == []
    assert [
        url for url in browser.requests if not url.startswith((address, "blob:", "data:", "about:"))
    ] == []


def place(page: Any, x: float, y: float) -> tuple[float, float]:
    """The window position at a fraction of the image's width and height."""
    left, top, width, height = page.run(
        "(() => { const b = document.getElementById('view').getBoundingClientRect();"
        "return [b.left, b.top, b.width, b.height] })()"
    )
    return left + x * width, top + y * height


def settle(page: Any, condition: str) -> None:
    page.wait(f"({READY}) && ({condition})")


def shade(page: Any, x: float, y: float) -> list[int]:
    """The color drawn at a fraction of the canvas."""
    value: list[int] = page.run(
        "(() => { const c = document.getElementById('view');"
        f"return [...c.getContext('2d').getImageData({x} * c.width, {y} * c.height, 1, 1).data] }})()"
    )
    return value


def test_hover_lights_the_group_and_its_keys(page: Any) -> None:
    page.mouse("move", *place(page, 0.21, 0.32))
    settle(page, "explorer.now.hover !== null && explorer.timings.hover.length > 0")
    token, group, member, other = page.run(
        "(() => { const v = explorer.now.view, t = explorer.focus().token, g = v.groupIds[t];"
        "const keys = new Set(v.keyIds.slice(g * v.k, (g + 1) * v.k)); const far = (i) => Math.hypot("
        "i % v.columns - t % v.columns, Math.floor(i / v.columns) - Math.floor(t / v.columns)) > 4;"
        "const free = [...v.groupIds.keys()].filter((i) => !keys.has(i) && far(i));"
        "return [t, g, free.find((i) => v.groupIds[i] === g), free.find((i) => v.groupIds[i] !== g)] })()"
    )
    columns, rows = page.run("[explorer.now.view.columns, explorer.now.view.rows]")
    assert token == int(0.32 * rows) * columns + int(0.21 * columns)
    assert f"group {group}" in page.run("document.getElementById('readout').textContent")

    def lightness(index: int) -> float:
        middle = [(index % columns + 0.5) / columns, (index // columns + 0.5) / rows]
        return sum(shade(page, *middle)[:3])

    assert page.run("document.documentElement.dataset.theme") == "light"
    assert lightness(other) > 500  # faded towards white
    assert lightness(member) < lightness(other)


def test_block_head_and_size_change_what_is_asked(page: Any) -> None:
    page.run("document.querySelector('#stage button[value=\"3\"]').click()")
    settle(page, "explorer.now.view.rows === 4")
    page.run("document.querySelector('#head button[value=\"2\"]').click()")
    settle(page, "location.hash.includes('h=2')")
    page.press("]")
    settle(page, "location.hash.includes('b=3')")
    page.run("document.querySelector('#size button[value=\"128\"]').click()")
    settle(page, "explorer.now.view.rows === 8")
    asked = [url.partition("?")[2] for url in page.requests if "/api/view" in url]
    assert asked[-1] == "image=scene-0&size=128&block=3&head=2&k=32"


def test_k_acts_live(page: Any) -> None:
    slide = "(() => { const k = document.getElementById('k'); k.value = %d; k.dispatchEvent(new Event('input')) })()"
    for value in (200, 400, 700, 1000, 0):
        page.run(slide % value)
    settle(page, "explorer.now.view.k === 1")
    held = page.run("document.getElementById('held').textContent")
    page.run(slide % 1000)
    settle(page, "explorer.now.view.k === explorer.now.view.tokens")
    assert page.run("document.getElementById('held').textContent") == "100 %" != held
    page.run("document.getElementById('view').focus()")
    page.press("-")
    settle(page, "explorer.now.view.k < explorer.now.view.tokens")


def test_two_pins_are_compared_and_kept_in_the_link(page: Any, address: str) -> None:
    groups = "explorer.state.pins.map((p) => explorer.now.view.groupIds["
    groups += "Math.floor(p[1] * explorer.now.view.rows) * explorer.now.view.columns + "
    groups += "Math.floor(p[0] * explorer.now.view.columns)])"
    first, second = page.run(
        "(() => { const v = explorer.now.view, other = v.groupIds.findIndex((g) => g !== v.groupIds[0]);"
        "return [0, other].map((t) => [(t % v.columns + 0.5) / v.columns,"
        "(Math.floor(t / v.columns) + 0.5) / v.rows]) })()"
    )
    page.mouse("click", *place(page, *first))
    page.mouse("click", *place(page, *second))
    page.wait("explorer.state.pins.length === 2")
    assert "keys in common" in page.run("document.getElementById('common').textContent")
    assert page.run("document.querySelectorAll('.pin canvas').length") == 4
    cut = "[...document.querySelectorAll('.pin header span')].filter((told) => told.scrollWidth > told.clientWidth)"
    assert page.run(f"{cut}.length") == 0
    # A run's name is no data's.
    assert "trained on" not in page.run("document.getElementById('model').textContent")
    pinned, link = page.run(groups), page.run("location.href")
    page.open(link)
    settle(page, "explorer.state.pins.length === 2")
    assert page.run(groups) == pinned
    page.mouse("click", *place(page, *first))
    page.wait("explorer.state.pins.length === 1")
    page.press("Escape", 27)
    page.wait("explorer.state.pins.length === 0")


def test_map_colors_the_groups_that_the_slider_allows(page: Any) -> None:
    page.run("document.activeElement.blur()")
    page.press("m")
    settle(page, "explorer.state.map && location.hash.includes('m=1')")
    two_frames = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    colors = "(() => { const v = explorer.now.view, c = document.getElementById('view'), x = c.getContext('2d');"
    colors += "return [...v.groupIds.keys()].map((t) => x.getImageData((t % v.columns + 0.5) * c.width / v.columns, "
    colors += "(Math.floor(t / v.columns) + 0.5) * c.height / v.rows, 1, 1).data.join()) })()"
    page.run(two_frames)
    everything = page.run(colors)
    page.run("document.getElementById('groups').value = 1")
    page.run("document.getElementById('groups').dispatchEvent(new Event('input'))")
    page.run(two_frames)
    one = page.run(colors)
    group_of = page.run("[...explorer.now.view.groupIds]")
    lost = {
        group
        for group, before, after in zip(group_of, everything, one, strict=True)
        if before != after
    }
    assert len(set(group_of) - lost) == 1, "one group keeps its color, every other loses it"
    assert page.run("document.getElementById('groups-out').textContent").startswith("1 of")


def test_the_keyboard_alone_is_enough(page: Any) -> None:
    page.run("document.getElementById('view').focus()")
    page.press("ArrowRight", 39)
    page.wait("explorer.now.hover !== null")
    before = page.run("explorer.focus().token")
    page.press("ArrowLeft", 37)
    page.wait(f"explorer.focus().token === {before} - 1")
    page.press("Enter", 13)
    page.wait("explorer.state.pins.length === 1")
    theme = page.run("document.documentElement.dataset.theme")
    page.press("t")
    assert page.run("document.documentElement.dataset.theme") != theme
    page.press("?")
    assert page.run("document.getElementById('about').open")


def test_a_dropped_image_is_shown_and_a_bad_one_is_reported(page: Any, tmp_path: Path) -> None:
    Image.effect_noise((150, 100), 60).convert("RGB").save(tmp_path / "wide.png")
    (tmp_path / "page.html").write_text("<script>alert(1)</script>")
    (tmp_path / "torn.png").write_bytes((tmp_path / "wide.png").read_bytes()[:900])
    page.drop(tmp_path / "wide.png", *place(page, 0.5, 0.5))
    settle(
        page,
        "explorer.state.image.startsWith('upload-') && explorer.now.view.columns > explorer.now.view.rows",
    )
    assert page.run("document.querySelectorAll('.strip button').length") == 9
    assert page.run("document.getElementById('notice').hidden")
    for name, words in (("page.html", "not an image"), ("torn.png", "damaged")):
        page.drop(tmp_path / name, *place(page, 0.5, 0.5))
        page.wait(f"document.getElementById('notice').textContent.includes('{words}')")
    # The refusals themselves.
    page.errors[:] = [error for error in page.errors if "415" not in error]
    page.run("document.querySelector('.strip button').click()")
    settle(page, "explorer.state.image === 'scene-0' && document.getElementById('notice').hidden")


def test_a_view_is_saved_as_png(page: Any, tmp_path: Path) -> None:
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.run("document.getElementById('save').click()")
    end = time.monotonic() + 60
    while not (found := list(tmp_path.glob("*.png"))) and time.monotonic() < end:
        time.sleep(0.05)
    with Image.open(found[0]) as saved:
        assert saved.format == "PNG"
        assert saved.height > saved.width > 300  # the image, and a line of words under it


@pytest.mark.parametrize("width", [390, 820, 1440])
def test_nothing_sticks_out_at_any_width(page: Any, address: str, width: int) -> None:
    for dark in (False, True):
        page.open(f"{address}#i=scene-0&p=0.1,0.1;0.6,0.6", width=width, height=900, dark=dark)
        page.wait(READY)
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
        assert page.run("document.getElementById('view').clientWidth") > 0.4 * min(width, 900)
