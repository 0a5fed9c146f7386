"""A headless Chromium for tests, controlled over its DevTools protocol, so no driver is needed."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--remote-debugging-port=0",
    "--force-color-profile=srgb",
)


def find() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page in its own browser with an empty profile; `errors` and `requests` record its activity."""

    def __init__(self, program: str) -> None:
        self.profile = tempfile.mkdtemp(prefix="dgt-browser-")
        command = [program, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._open = contextlib.ExitStack()
        try:
            self._socket = self._open.enter_context(
                connect(self._address(), max_size=None, compression=None)
            )
        except BaseException:
            self._stop()
            raise
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._open.close()
        self._stop()

    def _stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)

    def _address(self) -> str:
        told = Path(self.profile) / "DevToolsActivePort"
        for _ in range(1200):
            if told.exists() and told.read_text().count("\n"):
                port = told.read_text().split()[0]
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [each for each in json.load(answer) if each["type"] == "page"]
                if pages:
                    return str(pages[0]["webSocketDebuggerUrl"])
            time.sleep(0.1)
        raise RuntimeError("the browser did not start within two minutes")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the protocol and return its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=200))
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, about = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.errors.append(str(about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", "thrown"))
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> Any:
        """Wait until a JavaScript expression is true; return its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.run(script)
            if value:
                return value
            time.sleep(0.03)
        raise AssertionError(f"not within {seconds} s: {script}")

    def open(
        self, url: str, width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1
    ) -> None:
        """Load a page in a window of this size."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=phone,
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def mouse(self, kind: str, x: float, y: float) -> None:
        """`move` the pointer to a position, or `click` there."""
        button = {"button": "left", "clickCount": 1} if kind == "click" else {}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for event in ("mousePressed", "mouseReleased") if kind == "click" else ():
            self.call("Input.dispatchMouseEvent", type=event, x=x, y=y, **button)

    def press(self, key: str, code: int = 0) -> None:
        """Press a key, given by name, such as `ArrowRight`, or as a character."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def drop(self, file: Path, x: float, y: float) -> None:
        """Drag a file to a position and drop it."""
        data = {"items": [], "files": [str(file)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write a screenshot of the window, or the whole page, as PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))


def main() -> None:
    """Take a screenshot of an explorer page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("url")
    parser.add_argument("file", type=Path)
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--scale", type=float, default=1)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    program = find()
    if program is None:
        raise SystemExit(f"no Chromium found; looked for {', '.join(NAMES)}")
    with Browser(program) as browser:
        browser.open(options.url, options.width, options.height, options.dark, options.scale)
        browser.wait("window.explorer && explorer.now.curve && !document.querySelector('.busy')")
        browser.screenshot(options.file)


if __name__ == "__main__":
    main()
