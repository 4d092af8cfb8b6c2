"""A real browser for tests: headless Chromium, spoken to through two pipes (the DevTools protocol, no package needed)."""

import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, suppress

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
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
]
PATIENCE = 120
"""seconds after which an answer that has not come will not come"""


def find():
    """The path of a browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class BrowserError(Exception):
    pass


class Page:
    """One tab. What the page logs, throws or asks the network for is collected."""

    def __init__(self, to_browser, from_browser):
        self._to, self._from = to_browser, from_browser
        self._received = b""
        self._number = 0
        self._session = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]
            self._event(answer)

    def _read(self):
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._from], [], [], max(0, deadline - time.monotonic()))
            data = os.read(self._from, 1 << 20) if ready else b""
            if not data:
                raise BrowserError("the browser does not answer" if not ready else "the browser has ended")
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _event(self, message):
        method, parameters = message.get("method"), message.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(f"console.{parameters['type']}: {[a.get('value') for a in parameters['args']]}")
        elif method == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def open(self, path, width=1280, height=900, dark=False, touch=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.complaints, self.requests, self._events = [], [], []
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._event(self._read())

    def evaluate(self, expression):
        """The value of an expression after the page has drawn what it was about to draw."""
        return self.run(f"new Promise(done => requestAnimationFrame(() => setTimeout(() => done({expression}))))")

    def run(self, expression):
        """The value of an expression, by way of JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", **more)

    def click(self, x, y):
        self.mouse("mousePressed", x, y, clickCount=1)
        self.mouse("mouseReleased", x, y, clickCount=1)

    def drag(self, start, end, steps=5):
        (x0, y0), (x1, y1) = start, end
        self.mouse("mouseMoved", x0, y0)
        self.mouse("mousePressed", x0, y0, clickCount=1, buttons=1)
        for step in range(1, steps + 1):
            self.mouse("mouseMoved", x0 + (x1 - x0) * step / steps, y0 + (y1 - y0) * step / steps, buttons=1)
        self.mouse("mouseReleased", x1, y1, clickCount=1)

    def touch_drag(self, start, end, steps=5):
        (x0, y0), (x1, y1) = start, end
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x0, "y": y0}])
        for step in range(1, steps + 1):
            point = {"x": x0 + (x1 - x0) * step / steps, "y": y0 + (y1 - y0) * step / steps}
            self.call("Input.dispatchTouchEvent", type="touchMove", touchPoints=[point])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key, **more):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **more)

    def screenshot(self, whole=True):
        """A PNG, base64."""
        return self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]


@contextmanager
def opened(folder):
    """A page in a browser of its own, with a profile in ``folder``; the browser ends with the block."""
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    words = [find(), *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    # The browser reads from descriptor 3 and writes to 4.
    command = f"exec {shlex.join(words)} 3<&{read_commands} 4>&{write_answers}"
    process = subprocess.Popen(
        ["bash", "-c", command],
        pass_fds=(read_commands, write_answers),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Page(write_commands, read_answers)
    finally:
        os.close(write_commands)
        os.close(read_answers)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own session, with all its helpers
        process.wait()
