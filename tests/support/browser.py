# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium, driven over a pipe by the DevTools protocol: no driver and no package is needed."""

import base64
import fcntl
import functools
import http.server
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
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
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """Returns the browser's command, if there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One tab. `errors` collects what the console reports as an error and exceptions that nobody caught."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._buffer, self._number = commands, answers, b"", 0
        self.errors: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        """Reads one message, and takes note of events."""
        while b"\0" not in self._buffer:
            piece = os.read(self._answers, 1 << 20)
            if not piece:
                raise RuntimeError("the browser ended")
            self._buffer += piece
        raw, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(raw)
        parameters = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.errors.append(parameters["entry"]["text"])
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "assert"):
                self.errors.append(str(parameters["args"]))
            case "Runtime.exceptionThrown":
                self.errors.append(parameters["exceptionDetails"]["text"])
            case _:
                pass
        return message

    def open(self, url: str, *, width: int, dark: bool = False) -> None:
        """Opens an address at a width and in a theme, and waits until it is loaded. Earlier errors are forgotten."""
        self.errors.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._go("about:blank")  # a page that is still open would store its theme again
        origin = "/".join(url.split("/")[:3])
        self.call("Storage.clearDataForOrigin", origin=origin, storageTypes="local_storage")
        self._go(url)

    def _go(self, url: str) -> None:
        """Navigates, and waits until the page is loaded."""
        self._loaded = False
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._read()

    def run(self, expression: str) -> Any:
        """Evaluates JavaScript."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def fits(self, width: int) -> bool:
        """Whether the page has nothing to scroll sideways, and the console no error; what it has fails the test."""
        assert self.errors == []
        wide = self.run("document.documentElement.scrollWidth")
        assert wide <= width, f"the page is {wide} pixels wide"
        return True

    def brightness(self) -> float:
        """Returns how bright the page's ground is, from 0 to 1."""
        channels = self.run("getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).map(Number)")
        return sum(channels) / 3 / 255

    def wait_for(self, expression: str, tries: int = 200) -> Any:
        """Evaluates JavaScript until the result is true."""
        for _ in range(tries):
            if result := self.run(expression):
                return result
            time.sleep(0.05)
        raise AssertionError(f"did not come true: {expression}")

    def screenshot(self, path: Path) -> None:
        """Stores a picture of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Starts the browser with an empty profile, and ends it."""
    command = find_chromium()
    assert command is not None
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()

    def wire() -> None:
        # The browser reads 3 and writes 4, which the pipes may hold already: copies beyond those come first.
        reads, writes = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (from_us, to_us))
        os.dup2(reads, 3)
        os.dup2(writes, 4)

    process = subprocess.Popen(
        [command, *FLAGS, f"--user-data-dir={profile}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=wire,
    )
    os.close(from_us)
    os.close(to_us)
    try:
        yield Page(to_browser, from_browser)
    finally:
        process.kill()
        process.wait()
        for fd in (to_browser, from_browser):
            with suppress(OSError):
                os.close(fd)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder on this machine, at a free port; yields its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
