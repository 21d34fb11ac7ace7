"""A headless Chromium, driven over the DevTools protocol through two pipes."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One page: what it logs, what it asks the network for, and what can be done with it."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._rest = to_browser, from_browser, b""
        self._ids = itertools.count(1)
        self._session: str | None = None
        self.said: list[str] = []  # errors and warnings
        self.asked_for: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> Any:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], 60)
            assert ready, "Chromium said nothing for 60 s"
            got = os.read(self._from, 1 << 20)
            assert got, "Chromium has ended"
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.said.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.said.append(str(params["args"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.said.append(str(params["entry"]))
        elif message.get("method") == "Network.requestWillBeSent":
            self.asked_for.append(params["request"]["url"])
        return message

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def open(self, path: Path, until: str) -> None:
        """Open a file, and wait until an expression is true."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + 60
        while not self.evaluate(until):
            assert time.monotonic() < end, f"never true: {until}; the page said {self.said}"

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, or of the promise that it gives."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def page() -> Iterator[Page]:
    """A page of a Chromium that ends with the block."""
    assert CHROMIUM is not None
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        command = [
            CHROMIUM, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-dev-shm-usage", f"--user-data-dir={home}",
        ]  # fmt: skip

        def as_3_and_4() -> None:
            # away from 3 and 4 first, which either of them may have
            commands, answers = os.dup(read_commands), os.dup(write_answers)
            while commands in (3, 4):
                commands = os.dup(commands)
            while answers in (3, 4):
                answers = os.dup(answers)
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        process = subprocess.Popen(
            command, preexec_fn=as_3_and_4, close_fds=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"},  # whose name Intl refuses
        )  # fmt: skip
        os.close(read_commands)
        os.close(write_answers)
        try:
            opened = Page(write_commands, read_answers)
            yield opened
            opened._session = None
            opened.call("Browser.close")
        finally:
            os.close(write_commands)
            os.close(read_answers)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
