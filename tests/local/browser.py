"""Debian's chromium without a window, driven by its own debugging protocol over a loopback socket."""

import asyncio
import base64
import contextlib
import io
import itertools
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image

CHROMIUM = shutil.which("chromium")
START_SECONDS = 300.0
ANSWER_SECONDS = 300.0
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update"),
    *("--remote-debugging-port=0", "about:blank"),
)
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowRight": 39}


class Browser:
    """One page. ``console``: what it logged as an error, refusals of its policy included."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.console: list[str] = []
        self.uncaught: list[str] = []
        self.requests: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Runtime.exceptionThrown":
                self.uncaught.append(event["params"]["exceptionDetails"]["exception"]["description"])
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.console.append(event["params"]["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        event = await asyncio.wait_for(answer, ANSWER_SECONDS)
        assert "error" not in event, (method, event["error"])
        result: dict[str, Any] = event["result"]
        return result

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("location.protocol === 'http:' && document.readyState === 'complete'")

    async def value(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        done = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def until(self, script: str, seconds: float = 60.0) -> Any:
        """Return an expression's value as soon as it is true, unless a script of the page has failed before."""
        try:
            async with asyncio.timeout(seconds):
                # An element has no value that could be returned.
                while not (value := await self.value(f"((it) => it instanceof Node || it)({script})")):
                    assert self.uncaught == []
                    await asyncio.sleep(0.05)
        except TimeoutError:
            shown = await self.value("document.body.innerText")
            pytest.fail(f"never true: {script}; the page shows:\n{shown[:3000]}\n{self.console}")
        return value

    async def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)

    async def colours(self, scheme: str) -> None:
        """Let the system prefer ``light`` or ``dark``; nothing moves, so that pictures are equal."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def press(self, key: str) -> None:
        named = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"Enter": "\r", " ": " "}.get(key)
        await self.call("Input.dispatchKeyEvent", type="keyDown", **named, **({"text": text} if text else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    async def click(self, script: str) -> None:
        """Press the mouse's button in the middle of an element that an expression returns."""
        box = await self.value(
            f"(() => {{ const it = {script}; it.scrollIntoView({{block: 'center'}});"
            " const r = it.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            await self.call("Input.dispatchMouseEvent", type=kind, **where)

    async def picture(self, file: Path, *, whole: bool = False) -> None:
        """Write a picture of what is visible, or of the whole page, in 128 colours. The mouse points at nothing."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB").quantize(128).save(file, optimize=True)


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Browser]:
    """Start chromium with its profile in ``folder``; skips where there is none."""
    if CHROMIUM is None:
        pytest.skip("not run: no chromium")
    profile = folder / "chromium"
    with (folder / "chromium.log").open("w") as log:
        process = subprocess.Popen([CHROMIUM, f"--user-data-dir={profile}", *FLAGS], stdout=log, stderr=log)
    try:
        port = await _port(profile / "DevToolsActivePort", process, folder / "chromium.log")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                page = next(target for target in await answer.json() if target["type"] == "page")
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Browser(socket)
    finally:
        process.terminate()
        process.wait(30)


async def _port(file: Path, process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Return the port that chromium has written to its profile."""
    async with asyncio.timeout(START_SECONDS):
        while not file.is_file() or len(file.read_text().splitlines()) < 2:
            assert process.poll() is None, log.read_text()[-2000:]
            await asyncio.sleep(0.05)
    return file.read_text().splitlines()[0]
