"""Headless Chromium, driven through two pipes by its DevTools protocol: JSON messages that end with a zero byte."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# The browser reads commands from file 3 and writes answers to file 4.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
TIMEOUT_S = 120.0


def executable() -> str:
    """The path of Chromium.

    Raises:
        RuntimeError: There is none.
    """
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    raise RuntimeError("no chromium: .ci/run installs Debian's (apt-get install chromium); without root, ask for it")


class Tab:
    """One page of the browser. ``events`` has what the browser reported since the last ``open``."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._read, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        # A reader who comes for the first time: the theme keeps the colour scheme that it showed.
        forget = "try { localStorage.clear() } catch {}"
        self.call("Page.addScriptToEvaluateOnNewDocument", source=forget)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def open(self, url: str, *, width: int = 1280, scheme: str = "light") -> None:
        """Loads a page anew, in a window of that width in pixels, for readers who prefer that colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not self._is_loaded(url):
            self.events.append(self._next())
        # The theme sets its colours by a script, and fades from one to the other.
        self.run("new Promise(requestAnimationFrame).then(() => new Promise(requestAnimationFrame))")
        self.run("Promise.all(document.getAnimations().map(each => each.finished)).then(() => 0)")

    def run(self, script: str) -> Any:
        """The value of an expression in JavaScript, awaited."""
        made = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in made:
            raise RuntimeError(f"{script[:80]}: {made['exceptionDetails']}")
        return made["result"].get("value")

    def picture(self, path: Path) -> None:
        """Saves the whole page as a PNG."""
        width, height = self.run("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _is_loaded(self, url: str) -> bool:
        """Whether the page has come and, after that, was loaded; what is left of the page before may report, too."""
        names = [
            "came" if event.get("params", {}).get("frame", {}).get("url") == url else event.get("method")
            for event in self.events
        ]
        return "came" in names and "Page.loadEventFired" in names[names.index("came") :]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._read:
            ready, _, _ = select([self._answers], [], [], max(0.0, end - time.monotonic()))
            got = os.read(self._answers, 1 << 16) if ready else b""
            if not got:
                raise RuntimeError("chromium ended" if ready else f"chromium is silent for {TIMEOUT_S:.0f} s")
            self._read += got
        message, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A running browser whose files are in an empty folder."""
    program = [executable(), *FLAGS, f"--user-data-dir={profile}"]
    theirs_in, commands = os.pipe()
    answers, theirs_out = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), *program],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Tab(commands, answers)
    finally:
        os.close(commands)
        os.close(answers)
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
