"""A headless Chromium, driven through the W3C WebDriver protocol of chromedriver."""

import base64
import contextlib
import shutil
import socket
import subprocess
import time

import httpx
import pytest

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
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's key of an element's id


class Browser:
    """One window.

    Args:
        client: of chromedriver.
        session: path of the window's session.
    """

    def __init__(self, client, session):
        self._client, self._session = client, session

    def open(self, address):
        self._post("/url", url=address)

    def run(self, script, *args):
        """Runs JavaScript and returns what it returns."""
        return self._post("/execute/sync", script=script, args=list(args))

    def click(self, selector):
        self._post(f"{self._find(selector)}/click")

    def type(self, selector, text):
        self._post(f"{self._find(selector)}/value", text=text)

    def text(self, selector):
        """Returns the text of the first element of a CSS selector."""
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def texts(self, selector):
        return self.run("return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)", selector)

    def wait(self, condition, seconds=30.0):
        """Waits until a function returns something true, and returns it."""
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, f"the page did not get there; it shows: {self.text('body')}"
            time.sleep(0.05)
        return value

    def set_media(self, **features):
        """Sets media features, such as `prefers_color_scheme="dark"`."""
        values = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self._post("/goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"features": values})

    def set_size(self, width, height):
        """Sets the size of the page in CSS pixels."""
        params = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._post("/goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=params)

    def console_errors(self):
        """Returns the console's warnings and errors since the last call, such as scripts that the policy blocked."""
        entries = self._post("/se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self._client.get(f"{self._session}/screenshot").json()["value"]))

    def _find(self, selector):
        return f"/element/{self._post('/element', using='css selector', value=selector)[_ELEMENT]}"

    def _post(self, path, **body):
        value = self._client.post(self._session + path, json=body).json()["value"]
        assert not (isinstance(value, dict) and "error" in value), value["message"]
        return value


@contextlib.contextmanager
def open_browser(folder):
    """Yields a `Browser` with a profile in `folder`; skips the test where Chromium or its driver is missing."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or chromium is None:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            _wait_for_driver(client)
            options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={folder}"]}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            answer = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
            assert "sessionId" in answer, answer["message"]
            session = f"/session/{answer['sessionId']}"
            try:
                yield Browser(client, session)
            finally:
                client.delete(session)  # ends Chromium
    finally:
        process.terminate()
        process.wait()


def _wait_for_driver(client, seconds=20.0):
    end = time.monotonic() + seconds
    while True:
        try:
            if client.get("/status").json()["value"]["ready"]:
                return
        except httpx.TransportError:
            assert time.monotonic() < end, "chromedriver does not answer"
        time.sleep(0.05)
