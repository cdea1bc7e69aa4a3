"""A real Chromium for tests, driven through a pair of pipes: no package beside the browser itself is needed.

The protocol is Chrome's DevTools, as JSON texts that end in a zero byte. `CHROMIUM` in the environment names another
program than the one on the path.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE = 60.0
"""Seconds that one answer may take on a busy machine."""


def chromium() -> str | None:
    """The browser on this machine, if there is one."""
    names = [os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


class Browser:
    """One page of a headless browser."""

    def __init__(self, program: str, profile: Path) -> None:
        there, ours = os.pipe()
        mine, theirs = os.pipe()
        self._write, self._read = ours, mine
        # The browser reads its orders from descriptor 3 and answers on 4: out of the way first, then into place.
        inside = [fcntl.fcntl(pipe, fcntl.F_DUPFD, 10) for pipe in (there, theirs)]
        place = f"import os, sys; os.dup2({inside[0]}, 3); os.dup2({inside[1]}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        flags = "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-dev-shm-usage --hide-scrollbars"
        command = [program, *flags.split(), "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", place, *command],
            pass_fds=inside,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for pipe in (there, theirs, *inside):
            os.close(pipe)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One order, and its answer; what else arrives is kept in `events`."""
        self._number += 1
        order = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._write, json.dumps(order).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self._read, 1 << 20) if ready else b""
            assert piece, "the browser does not answer"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a file from disk, at this size and in this theme, and wait until it is there."""
        phone = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[theme])
        self.events.clear()
        self.send("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key, as a person would press it: "Tab", "Enter" or " "."""
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key)
        extra = {} if text is None else {"text": text}
        known = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": codes[key]}
        self.send("Input.dispatchKeyEvent", type="keyDown", **known, **extra)
        self.send("Input.dispatchKeyEvent", type="keyUp", **known)

    def complaints(self) -> list[str]:
        """Errors and warnings since the page was opened: exceptions, console calls, refusals by the policy."""
        self.evaluate("0")  # whatever was on its way has arrived when the answer has
        found = []
        for event in self.events:
            method, given = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(given["exceptionDetails"]))
            elif method == "Log.entryAdded":
                found.append(str(given["entry"]["text"]))
            elif method == "Runtime.consoleAPICalled":
                found.append(str(given["args"]))
        return found

    def requests(self) -> list[str]:
        """Everything that the page asked for since it was opened, itself included."""
        self.evaluate("0")
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.send("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._write)
        os.close(self._read)


@contextlib.contextmanager
def browsing(program: str, profile: Path) -> Iterator[Browser]:
    browser = Browser(program, profile)
    try:
        yield browser
    finally:
        browser.close()
