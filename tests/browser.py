"""A headless Chromium, by its DevTools protocol over a pipe (`--remote-debugging-pipe`): messages are JSON, each ended by a
zero byte."""

from __future__ import annotations

import base64
import json
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TIMEOUT = 60.0  # seconds for an answer


class Browser:
    """One tab. `problems`: what its console and log said so far: errors, warnings, refused requests."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._left = to_browser, from_browser, b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(from_browser, selectors.EVENT_READ)
        self._number, self._session = 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT
        while b"\0" not in self._left:
            assert self._selector.select(end - time.monotonic()), "the browser does not answer"
            data = os.read(self._from, 1 << 16)
            assert data, "the browser has ended"
            self._left += data
        line, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, page: Path, width: int, *, dark: bool = False, javascript: bool = True, height: int = 900) -> None:
        """Shows a file and waits until it is loaded and drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Emulation.setScriptExecutionDisabled", value=not javascript)
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())
        if javascript:
            self.settle()

    def settle(self) -> None:
        """Waits for two frames, in which what has changed is drawn."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript in the page, as JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """A key, down and up, in what has the focus."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)

    def click(self, selector: str) -> None:
        """A click of the mouse in the middle of the first element that matches."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def middle(self, selector: str) -> tuple[float, float]:
        place = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{place}.scrollIntoView({{block: 'center'}})")
        x, y = self.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({place}.getBoundingClientRect())"
        )
        return x, y

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def screenshot(self, path: Path) -> None:
        """The whole page, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    @property
    def problems(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and log entries since the page was opened."""
        self.evaluate("0")  # what came before it has been read then
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]

    @property
    def requests(self) -> Sequence[str]:
        """Addresses that were asked for since the page was opened, without those that its policy has blocked."""
        asked, failed = (
            [event["params"] for event in self.events if event.get("method") == f"Network.{name}"]
            for name in ("requestWillBeSent", "loadingFailed")
        )
        blocked = {params["requestId"] for params in failed if params.get("blockedReason") == "csp"}
        return [params["request"]["url"] for params in asked if params["requestId"] not in blocked]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A Chromium of its own, with its profile in a folder that may be removed afterwards."""
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-background-networking", "--disable-component-update", "--disable-extensions"]
    (read_in, write_in), (read_out, write_out) = os.pipe(), os.pipe()
    # The browser reads from descriptor 3 and writes to 4.
    moved = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
    command = ["bash", "-c", moved, "bash", str(read_in), str(write_out), CHROMIUM, *options]
    command += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
    with (profile.parent / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            command, pass_fds=(read_in, write_out), stdout=log, stderr=log, start_new_session=True
        )
    os.close(read_in)
    os.close(write_out)
    try:
        yield Browser(write_in, read_out)
    finally:
        os.close(write_in)  # it ends when the pipe does
        os.close(read_out)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
