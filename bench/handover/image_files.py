"""Delivery of an image to an engine as a file of the node, against base64 in the body: 0.1, 1 and 10 MB, end to end.

The router's part is the delivery of real requests (``mmrouter_router.handover``), over its own HTTP client. The
engine's part is a real vLLM front end: ``vllm launch render`` reads, decodes and processes an image by the code of
``vllm serve``; what follows there, the model, is equal for both ways. Files are padded PNGs with few pixels.
"""

import asyncio
import os
import resource
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from bench.pictures import padded_png
from bench.rows import Row, not_run, row
from hack.engines import vllm_env
from mmrouter_lib.api import parse_deployment
from mmrouter_router.fleet.workers import Fleet, Member
from mmrouter_router.handover import AddressedRequest, BufferedAnswer, BytesDelivery, Delivery, Handover
from mmrouter_router.handover.files import SharedFolder
from mmrouter_router.http.upstream import Body, Upstream, UpstreamError
from mmrouter_router.media import Media
from mmrouter_router.request.engine_request import Outgoing, OutgoingImage
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_sim import install

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-qwen2-vl"
TMPFS = Path("/dev/shm")
PATH = "/v1/chat/completions/render"
PORT = 8000
SIZES = (100_000, 1_000_000, 10_000_000)
ROUNDS = 30
START_SECONDS = 120
LIMIT = 1 << 30


class MediaError(Exception):
    """An engine failed or answered wrongly, so there are no figures."""


def run() -> list[Row]:
    """Measure with the real front end where its environment is, and with the simulator."""
    if not TMPFS.is_dir():
        return [not_run("image by file, below base64", "x", "no /dev/shm")]
    real = vllm_env.env_dir()
    result = []
    if (real / "bin" / "vllm").is_file():
        result += asyncio.run(_measure(real / "bin", "vLLM's front end"))
    else:
        result.append(not_run("vLLM's front end", "ms", f"no environment in {real}: python -m hack.engines.vllm_env"))
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        return result + asyncio.run(_measure(Path(folder), "simulator"))


async def _measure(programs: Path, name: str) -> list[Row]:
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="mmrouter-bench-", dir=TMPFS) as root,
        _front_end(programs, Path(root)) as ip,
    ):
        rig = _DeliveryRig(Path(root), ip)
        await rig.ready()
        try:
            for size in SIZES:
                rows += await rig.compare(size, name)
        finally:
            rig.close()
    return rows


class _DeliveryRig:
    """A router's delivery to one engine, by both ways."""

    def __init__(self, root: Path, ip: str) -> None:
        self._upstream, self._ip = Upstream(), ip
        pool = {"name": "w", "role": "worker", "accelerator": {"kind": "cpu"}, "sharedMemory": {"scope": "node"}}
        spec = {"model": {"id": "m"}, "engine": {"type": "vllm"}, "routing": {"transfer": "shm"}, "pools": [pool]}
        resource = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment", "metadata": {"name": "bench"}}
        metrics = Metrics()
        fleet = Fleet(metrics)
        self._worker = fleet.join(Member("u", "w-0", ip, "w", "worker", "n"))
        self._folder = SharedFolder(root, "bench", LIMIT, LIMIT)
        self._ways: dict[str, Delivery] = {
            "base64": BytesDelivery(),
            "file": Handover(
                parse_deployment({**resource, "spec": spec}),
                fleet,
                self._upstream,
                "",
                metrics,
                list,
                node="n",
                folder=self._folder,
                always=True,
            ),
        }

    async def ready(self) -> None:
        """Wait until the engine answers. Raises :class:`MediaError`."""
        for _ in range(START_SECONDS * 5):
            try:
                answer = await self._upstream.request(self._ip, PORT, "GET", "/health", {})
                await answer.read(1)
                answer.close()
                return
            except UpstreamError:
                await asyncio.sleep(0.2)
        raise MediaError("the front end did not start")

    async def compare(self, size: int, name: str) -> list[Row]:
        """Return the figures of one size: medians of rounds in which both ways alternate."""
        media = Media(padded_png(size), "image/png", "data")
        wall: dict[str, list[float]] = {way: [] for way in self._ways}
        cpu: dict[str, list[float]] = {way: [] for way in self._ways}
        for number in range(-3, ROUNDS):
            for way, delivery in self._ways.items():
                took, spent = await self._once(delivery, media, way)
                if number >= 0:
                    wall[way].append(took)
                    cpu[way].append(spent)
        ms = {way: 1e3 * statistics.median(times) for way, times in wall.items()}
        used = {way: 1e3 * statistics.median(times) for way, times in cpu.items()}
        what = f"image of {size / 1e6:g} MB, {name}"
        return [
            row(f"{what}: by file", ms["file"], "ms", peer=f"base64: {ms['base64']:.3g} ms"),
            row(f"{what}: base64 over file", ms["base64"] / ms["file"], "x"),
            row(f"{what}: router CPU by file", used["file"], "ms", peer=f"base64: {used['base64']:.3g} ms"),
        ]

    async def _once(self, delivery: Delivery, media: Media, way: str) -> tuple[float, float]:
        """Send one request; return its seconds, and the CPU seconds of this process."""
        name = "m1-" + "0" * 64
        part = {"type": "image_url", "image_url": {"url": ""}, "uuid": name}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
        fields = {"model": "m", "messages": messages, "mm_payload": "none"}
        outgoing = Outgoing(PATH, fields, (OutgoingImage(0, 0, name, media),))

        async def post(body: Body) -> BufferedAnswer:
            headers = {"content-type": "application/json"}
            answer = await self._upstream.request(self._ip, PORT, "POST", PATH, headers, body)
            try:
                return BufferedAnswer(answer.status, await answer.read(1 << 24))
            finally:
                answer.close()

        told: list[dict[str, object]] = []
        began, used = time.perf_counter(), _cpu()
        said = await delivery.send(AddressedRequest(self._worker, outgoing, outgoing.fields), post, told)
        took, spent = time.perf_counter() - began, _cpu() - used
        if said.status != 200 or not orjson.loads(said.raw)["features"]:
            raise MediaError(f"answered {said.status}: {said.raw[:300]!r}")
        if way == "file" and told[0]["how"] != "file":
            raise MediaError(f"the image did not go by a file: {told}")
        return took, spent

    def close(self) -> None:
        self._folder.close()
        self._upstream.close()


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def _front_end(programs: Path, root: Path) -> Iterator[str]:
    """Run ``vllm launch render`` until the block ends; yields its address."""
    ip = _free_address()
    command = [str(programs / "vllm"), "launch", "render", str(MODEL), "--host", ip, "--port", str(PORT)]
    command += ["--served-model-name", "m", "--max-model-len", "8192", "--allowed-local-media-path", str(root)]
    variables = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "VLLM_TARGET_DEVICE": "cpu", "VLLM_HOST_IP": ip}
    variables |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VLLM_API_KEY")}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=kept | variables, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield ip
        except MediaError as error:
            log.seek(0)
            raise MediaError(f"{error}\n{log.read()[-2000:].decode(errors='replace')}") from error
        finally:
            process.kill()
            process.wait()


def _free_address() -> str:
    for number in range(1, 255):
        ip = f"127.91.0.{number}"
        try:
            with socket.create_server((ip, PORT)):
                return ip
        except OSError:
            continue
    raise MediaError("no loopback address is free")
