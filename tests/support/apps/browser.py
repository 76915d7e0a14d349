"""A headless Chromium for tests, driven by the DevTools protocol over a pipe: no package is needed for it.

https://chromedevtools.github.io/devtools-protocol/: with --remote-debugging-pipe the browser reads commands
from file descriptor 3 and answers on 4. Each is a JSON object that ends with a NUL.
"""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAIT_S = 60.0
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")


class Page:
    """A tab; every message that the browser sends about it is kept in `events`."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._number, self._buffer, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> Any:
        """Run a command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._answers], [], [], WAIT_S)[0], "the browser does not answer"
            block = os.read(self._answers, 1 << 20)
            assert block, "the browser has ended"
            self._buffer += block
        text, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def show(self, width: int, height: int, scheme: str = "light", medium: str = "") -> None:
        """Set the size in pixels, the colour scheme and the medium (`screen` or `print`)."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=width < 600,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=medium, features=features)

    def open(self, url: str) -> None:
        """Load a page and wait until its scripts have run."""
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Return the expression's first true value."""
        end = time.monotonic() + WAIT_S
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)
        return value

    def click(self, selector: str) -> None:
        """Click on the middle of an element."""
        x, y = self.middle_of(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._mouse(kind, x, y, "none" if kind == "mouseMoved" else "left")

    def middle_of(self, selector: str) -> tuple[float, float]:
        """Scroll an element into view and return its middle."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.run(f"{element}.getBoundingClientRect().toJSON()")
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def hover(self, x: float, y: float) -> None:
        """Move the mouse to a point."""
        self._mouse("mouseMoved", x, y, "none")

    def _mouse(self, kind: str, x: float, y: float, button: str) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def press(self, key: str) -> None:
        """Press a key and release it: `Enter`, or a character."""
        text = "\r" if key == "Enter" else key
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": ord(text)}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **pressed)
        self.send("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def problems(self) -> list[str]:
        """Return what the page wrote to the console as errors, and its uncaught exceptions."""
        found = []
        for event in self.events:
            parameters = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                found.append(str(parameters["entry"]["text"]))
        return found

    def requested(self) -> list[str]:
        """Return the addresses that the page asked for, without what lies in the page itself."""
        requests = (it["params"] for it in self.events if it.get("method") == "Network.requestWillBeSent")
        urls = [request["request"]["url"] for request in requests]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]


@contextmanager
def opened(profile: Path) -> Iterator[Page]:
    """A page of a browser that ends with the block. profile: a folder for what the browser writes."""
    assert CHROMIUM is not None
    from_us, commands = os.pipe()
    answers, to_us = os.pipe()

    def place_pipes() -> None:
        # Both first to high numbers: one of them may be 3 or 4.
        high = [os.dup2(handle, 100 + place) for place, handle in enumerate((from_us, to_us))]
        for place, handle in enumerate(high):
            os.dup2(handle, 3 + place)

    process = subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
        preexec_fn=place_pipes,
        close_fds=False,  # 3 and 4 exist in the child alone; what we opened closes itself at exec
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(from_us)
    os.close(to_us)
    try:
        yield Page(commands, answers)
    finally:
        os.close(commands)  # the browser ends with its pipe
        os.close(answers)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
