"""A real engine as a subprocess on a loopback address of its own."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
import pytest
from conformance.event_listener import Listener

from hack.build_once import cache_dir
from mmrouter_cli.local.loopback_network import AddressBlock, take_block
from mmrouter_lib.api import MMRouterDeployment, parse_deployment
from mmrouter_lib.engines.base.launch import EVENTS_PORT, HTTP_PORT, REPLAY_PORT, Launch
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_lib.pod_paths import MODEL_DIR

BLOCK_SIZE = 32  # the CPU attention of vLLM takes multiples of 32 only
START_SECONDS = 600
"""Bound of a hang: an engine starts in 40 s on an idle machine, in ten times that on a busy one."""
API_KEY = "conformance"
CONTEXT = 8192
FREE_BYTES = 6 << 30  # 3 to 4.5 GB stay resident
MORE_BYTES = 3 << 29
"""For each further engine: most of an engine's memory is code, which engines share."""


@dataclass
class Engine:
    """A running engine. ``start_s`` is the time from its start to its first healthy answer."""

    model: str
    ip: str
    process: subprocess.Popen[bytes] | psutil.Process
    listener: Listener
    log: Path
    health_path: str = "/health"
    start_s: float = 0.0
    key: str = API_KEY
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=120, headers={"Authorization": f"Bearer {self.key}"})

    @property
    def url(self) -> str:
        return f"http://{self.ip}:{HTTP_PORT}"

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.post(body)
        assert answer.status_code == 200, f"{answer.status_code}: {answer.text}\n{tail(self.log)}"
        decoded: dict[str, Any] = answer.json()
        return decoded

    def post(self, body: dict[str, Any], **options: Any) -> httpx.Response:
        """Send a chat request that asks for token ids; greedy, never shortened by a stop token."""
        asked = {"max_tokens": 2, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}
        return self.client.post("/v1/chat/completions", json=asked, **options)

    def healthy(self) -> bool:
        return is_healthy(self.client, self.health_path)

    def memory_bytes(self) -> int:
        """Return the proportional set size of all its processes."""
        root = psutil.Process(self.process.pid)
        return sum(process.memory_full_info().pss for process in (root, *root.children(recursive=True)))


@contextmanager
def engine(
    env: Path,
    model_dir: Path,
    log: Path,
    *extra: str,
    kind: str = "vllm",
    wrapper: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Engine]:
    """Run a real engine over a shrunk model folder, with the product's own command line, until the block ends. The
    engine has an unused loopback address. Skips the test without enough free memory. ``kind`` is the engine type of a
    resource, ``vllm`` or ``sglang``; ``wrapper`` precedes the command, ``variables`` extend its environment.
    """
    require_memory()
    ip = addresses().next_pod()
    listener = Listener(ip, kind)
    try:
        made = command(model_dir, ip, kind)
        argv = [*wrapper, str(env / "bin" / made.command[0]), *made.command[1:], *made.args, *extra]
        with server(argv, log, environment(env, ip, log.parent) | made.env | dict(variables)) as process:
            running = Engine(model_dir.name, ip, process, listener, log, made.health_path)
            with running.client:
                running.start_s = wait_healthy(process, log, running.healthy)
                yield running
    finally:
        listener.close()


@contextmanager
def server(argv: Sequence[str], log: Path, env: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process in a group of its own until the block ends, so that its children end as well."""
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        yield process
    finally:
        stop(process)


def require_memory(engines: int = 1, reserved_bytes: int = 0) -> None:
    """Skip the test without memory for so many engines, beside what an engine leaves to other programs."""
    free, needed = psutil.virtual_memory().available, FREE_BYTES + (engines - 1) * MORE_BYTES + reserved_bytes
    if free < needed:
        who = "an engine needs" if engines == 1 else f"{engines} engines need"
        pytest.skip(f"not run: {free / 2**30:.1f} GB of memory free, {who} {needed / 2**30:g}")


@cache
def addresses() -> AddressBlock:
    """Reserve addresses until this session ends, against deployments and sessions beside it."""
    return take_block((HTTP_PORT, EVENTS_PORT, REPLAY_PORT))


def command(model_dir: Path, ip: str, kind: str) -> Launch:
    pool = {"name": "worker", "role": "worker", "replicas": 1, "accelerator": {"kind": "cpu"}}
    model = {"id": f"test/{model_dir.name}", "servedName": model_dir.name, "volume": {"emptyDir": {}}}
    args = engine_args(context_length(model_dir)) if kind == "vllm" else sglang_args(context_length(model_dir))
    spec = {
        "model": model | {"trustRemoteCode": any(model_dir.glob("*.py"))},
        "engine": {"type": kind, "blockSize": BLOCK_SIZE, "args": args},
        "pools": [pool],
    }
    dep = parsed(spec)
    made: Launch = LAUNCHERS[dep.spec.engine.type].launch(dep, dep.spec.pools[0])
    places = {"$(POD_IP)": ip, "$(POD_LOOPBACK)": ip, "$(SGLANG_API_KEY)": API_KEY, MODEL_DIR: str(model_dir)}
    return replace(made, args=[expanded(arg, places) for arg in made.args])


def parsed(spec: Mapping[str, Any]) -> MMRouterDeployment:
    """Return a deployment with a spec."""
    head = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment", "metadata": {"name": "conformance"}}
    return parse_deployment({**head, "spec": spec})


def expanded(text: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        text = text.replace(name, value)
    return text


def env_version(env: Path) -> str:
    """Return the engine's release by the name of its environment, ``engine-release-device``."""
    return env.name.split("-")[1]


def context_length(model_dir: Path) -> int:
    """Return the context length for an engine: that of the model, at most :data:`CONTEXT`."""
    config = json.loads((model_dir / "config.json").read_text())
    return min(CONTEXT, config.get("text_config", config).get("max_position_embeddings", CONTEXT))


def engine_args(context: int = CONTEXT) -> list[str]:
    """Return flags for a small engine: no weights, no compilation, a context for the workload's largest image."""
    return [
        *("--load-format", "dummy"),
        *("--dtype", "float32"),
        "--enforce-eager",
        *("--max-model-len", str(context)),
        *("--max-num-seqs", "4"),
        *("--distributed-executor-backend", "uni"),
    ]


RENDERS = "--enable-scale-out"
"""Lets a serving vLLM return rendered prompts, as ``vllm launch render`` does."""
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Run vLLM's scheduler and model in one process on a CPU, as on one GPU: a faster start and 0.8 GB less memory. The API
server keeps a process of its own."""
FORKED = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
"""Fork the engine's process from the API server, so that vLLM is imported once."""
SPAWNED = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""The default of vLLM's command, which one engine of this level uses (``vllm/test_fields.py``)."""
KEPT = {"VLLM_CACHE_ROOT": str(cache_dir() / "engines" / "kept-vllm")}
"""Cache the inspection of a model class per machine: without it, every start loads vLLM in another process for it."""
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""Disable PyTorch's compilation at the first request, which takes half a minute per engine."""
VLLM_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    **ONE_PROCESS,
    **FORKED,
    **KEPT,
    **EAGER,
}
TESTED_KERNELS = {"MMROUTER_TESTED_KERNELS": "1"}
"""Load the tested release's compiled part in the environment of a newer vLLM, which has none
(``hack/engines/newer_vllm_env.py``).
"""
SGLANG_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **EAGER}


def sglang_args(context: int = CONTEXT) -> list[str]:
    return [
        *("--load-format", "dummy"),
        *("--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch"),
        *("--grammar-backend", "none"),
        "--disable-cuda-graph",
        "--disable-overlap-schedule",
        "--skip-server-warmup",
        "--sleep-on-idle",  # otherwise its scheduler polls without a pause
        # The token limit bounds the cache. The fraction is of the memory that is free at the start, and other processes
        # may take as much while the weights load.
        *("--mem-fraction-static", "0.6"),
        *("--max-total-tokens", "131072"),
        *("--context-length", str(context)),
        *("--max-running-requests", "4"),
    ]


def environment(env: Path, ip: str, scratch: Path) -> dict[str, str]:
    dropped = {"PYTHONPATH", "VIRTUAL_ENV"}
    return {
        **{name: value for name, value in os.environ.items() if name not in dropped},
        "PATH": f"{env / 'bin'}{os.pathsep}{os.environ['PATH']}",
        **VLLM_ENVIRONMENT,
        "VLLM_HOST_IP": ip,
        "DO_NOT_TRACK": "1",
        "HF_HOME": str(scratch / "hf"),
        "HF_MODULES_CACHE": str(scratch / "hf" / "modules"),  # a model folder's own modules are copied there
    }


def is_healthy(client: httpx.Client, path: str = "/health") -> bool:
    try:
        return client.get(path, timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def wait_healthy(process: "subprocess.Popen[bytes]", log: Path, healthy: Callable[[], bool]) -> float:
    """Return the seconds until the first healthy answer."""
    began = time.monotonic()
    while not healthy():
        if process.poll() is not None:
            pytest.fail(f"the engine ended with {process.returncode}\n{tail(log)}")
        if time.monotonic() - began > START_SECONDS:
            pytest.fail(f"the engine is not healthy after {START_SECONDS} s\n{tail(log)}")
        time.sleep(0.2)
    return time.monotonic() - began


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])


def stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
