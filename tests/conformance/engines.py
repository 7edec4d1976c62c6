"""Deployments of real engines on a CPU: their resources, their processes and figures, and what they hold.

The latter is read by code that shares nothing with a sidecar, from the engines' replayed events alone.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
import yaml
from conformance.engine_process import (
    BLOCK_SIZE,
    SGLANG_ENVIRONMENT,
    START_SECONDS,
    VLLM_ENVIRONMENT,
    Engine,
    context_length,
    engine_args,
    sglang_args,
)
from conformance.event_listener import ReplayListener, replay
from conformance.setups import REPOSITORIES
from conformance.workload import Case
from local.rig import Deployment, metric, running
from waiting import wait_for

from mmrouter_lib.block_keys import chain, namespace_seed
from mmrouter_lib.cache_layout import DEVICE, FULL_KINDS
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.events import Cleared, Ragged, Removed, Stored
from mmrouter_sidecar.blocks.window_block_keys import WindowBlocks


@dataclass(frozen=True)
class Pod:
    """One engine of a deployment, as it was when it was looked for."""

    name: str
    uid: str
    ip: str
    processes: tuple[psutil.Process, ...]

    @property
    def key(self) -> str:
        """The key that it asks for."""
        return next(key for process in self.processes if (key := process.environ().get("VLLM_API_KEY")))

    def value(self, name: str, **labels: str) -> float:
        return metric(self.ip, name, 8000, **labels)

    def ask(self, body: Mapping[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.post(f"http://{self.ip}:8000{path}", json=body, headers=headers, timeout=120)

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def pods(deployment: Deployment) -> dict[str, Pod]:
    """Return the engines by role, of pools that have one each."""
    return dict(engines(deployment))


def engines(deployment: Deployment) -> list[tuple[str, Pod]]:
    """Return every engine with its role."""
    found: dict[str, list[psutil.Process]] = {}
    for child in psutil.Process(deployment.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            environment = child.environ()
            if "VLLM_API_KEY" in environment and "POD_NAME" in environment:
                found.setdefault(environment["POD_NAME"], []).append(child)
    return [
        (worker["role"], Pod(worker["name"], worker["uid"], worker["ip"], tuple(found.get(worker["name"], ()))))
        for worker in deployment.state()["workers"]
    ]


@contextmanager
def served_directly(deployment: Deployment) -> Iterator[Engine]:
    """Give the first engine of a deployment, for requests past the router."""
    pod = engines(deployment)[0][1]
    log = deployment.folder / "engine.log"
    engine = Engine("demo", pod.ip, pod.processes[0], ReplayListener(pod.ip), log, key=pod.key)
    with engine.client:
        yield engine


AGREE_SECONDS = 60
REPOSITORY = REPOSITORIES["qwen2_vl"]
MAX_PIXELS = 200_704
"""An encoder measures its largest image when it starts: minutes on a CPU, unless images are small."""
ROOM = {"phi3_v": ("--max-num-batched-tokens", "8192")}
"""Families whose vision tower vLLM builds at its real width: a larger step runs the tower less often."""
PROCESSOR = {"phi3_v": {"numCrops": 4}}
"""Of up to 16 tiles, an image has 2,500 tokens however small it is, and four of them leave the context."""
SGLANG_IMAGE = "example.invalid/sglang:0.5.23"  # SGLang has no default image for CPUs; local processes need none
LOOPBACK_MEDIA = {"fetch": "public", "allowedCIDRs": ["127.0.0.0/8"]}


def pool(
    role: str, variables: Mapping[str, str] = MappingProxyType(VLLM_ENVIRONMENT), *, replicas: int = 1, **more: Any
) -> dict[str, Any]:
    """Return a pool of CPU engines with an environment, named by its role."""
    return {
        "name": role,
        "role": role,
        "replicas": replicas,
        "accelerator": {"kind": "cpu"},
        "podTemplate": {"spec": {"containers": [{"name": "engine", "env": environment(variables)}]}},
        **more,
    }


def manifest(
    model_dir: Path,
    engine: Mapping[str, Any],
    pools: Iterable[Mapping[str, Any]],
    *,
    repository: str = REPOSITORY,
    frontends: int = 1,
    frontend: Mapping[str, Any] = MappingProxyType({}),
    routing: Mapping[str, Any] = MappingProxyType({"media": LOOPBACK_MEDIA}),
) -> dict[str, Any]:
    """Return an MMRouterDeployment. ``engine``, ``frontend`` and ``routing`` extend these sections of the spec."""
    return {
        "apiVersion": "mmrouter.io/v1alpha1",
        "kind": "MMRouterDeployment",
        "metadata": {"name": "demo"},
        "spec": {
            "model": {
                "id": repository,
                "volume": {"hostPath": {"path": str(model_dir)}},
                "trustRemoteCode": any(model_dir.glob("*.py")),
            },
            "engine": {"blockSize": BLOCK_SIZE, **engine},
            "frontend": {"replicas": frontends, "service": {"port": 8000}, **frontend},
            "routing": dict(routing),
            "pools": [dict(each) for each in pools],
        },
    }


def sglang_manifest(
    model_dir: Path,
    repository: str,
    pools: Iterable[tuple[str, int]],
    *args: str,
    variables: Mapping[str, str] = MappingProxyType({}),
    **more: Any,
) -> dict[str, Any]:
    """Return the same for SGLang. ``pools``: role and replicas; ``args``: further flags; ``variables``: of the engines'
    environment; ``more``: ``spec.engine``.
    """
    engine = {"type": "sglang", "image": SGLANG_IMAGE, "args": [*sglang_args(context_length(model_dir)), *args], **more}
    made = [pool(role, {**SGLANG_ENVIRONMENT, **variables}, replicas=replicas) for role, replicas in pools]
    return manifest(model_dir, engine, made, repository=repository)


def resource(
    model_dir: Path,
    pools: Iterable[Mapping[str, Any]],
    *,
    args: Iterable[str] = (),
    frontend: Mapping[str, str] = MappingProxyType({}),
    **routing: Any,
) -> dict[str, Any]:
    """Return a vLLM deployment with hand-over and one frontend, which fetches images from this machine. The model's
    repository is the one that its folder is named by. ``args``: further engine flags. ``frontend``: the router's
    environment.
    """
    media = {"fetch": "allowList", "allowedHosts": ["127.0.0.1"], "allowedCIDRs": ["127.0.0.0/8"]}
    router = {"name": "router", "env": environment(frontend)}
    return manifest(
        model_dir,
        vllm_engine(model_dir, *args, maxPixels=MAX_PIXELS),
        [{"sharedMemory": {"scope": "node"}, **each} for each in pools],
        frontend={"podTemplate": {"spec": {"containers": [router]}}},
        repository=model_dir.name.replace("--", "/"),
        routing={"media": media, "transfer": "none", **routing},
    )


def vllm_engine(model_dir: Path, *args: str, **processor: int) -> dict[str, Any]:
    """Return ``spec.engine`` with what the model's family needs. ``processor``: options that only Qwen's have."""
    family = json.loads((model_dir / "config.json").read_text())["model_type"]
    options = PROCESSOR.get(family, processor if family.startswith("qwen") else {})
    made = [*engine_args(context_length(model_dir)), *ROOM.get(family, ()), *args]
    return {"type": "vllm", "processor": options, "args": made}


def environment(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in values.items()]


@contextmanager
def deployed(env: Path, folder: Path, *documents: Mapping[str, Any]) -> Iterator[Deployment]:
    """Run a deployment of real engines until the block ends. ``env``: the engines' environment."""
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    with running(file, "--engines", "path", "--engine-env", str(env), start_seconds=START_SECONDS + 50) as deployment:
        yield deployment


def histories(deployment: Deployment, repository: str, kind: str = "vllm", ranks: int = 1) -> list["History"]:
    """Wait until every frontend's index equals what the replayed events of each engine's ranks say; return the latter,
    rank by rank.
    """
    found = []
    for worker in deployment.state()["workers"]:
        if worker["role"] == "encoder" or (kind, worker["role"]) == ("sglang", "decode"):
            continue  # they publish nothing
        for rank in range(ranks):
            truth = History(deployment, worker["ip"], repository, kind, rank)
            for number in range(len(deployment.controls)):

                def agree(truth: History = truth, uid: str = worker["uid"], number: int = number) -> bool:
                    return truth.keys() == set(deployment.keys(uid, number)["keys"].get(str(truth.rank), ()))

                wait_for(agree, AGREE_SECONDS, f"frontend {number} and rank {rank} of {worker['name']} agree")
            found.append(truth)
    return found


class History:
    def __init__(self, deployment: Deployment, ip: str, repository: str, kind: str = "vllm", rank: int = 0) -> None:
        self._ip, self._kind, self.rank = ip, kind, rank
        config = Path(next(iter(deployment.processes("router").values())).environ()["MMROUTER_CONFIG"])
        model = json.loads((config / "deployment.json").read_text())["spec"]["model"]
        key, revision = (config / "secrets" / "identity.key").read_bytes(), model.get("revision", "main")
        self._seed = partial(namespace_seed, key, model=repository, revision=revision)
        self.removed = self.most_copies = 0
        """How often a block was removed, and how many copies of one there were at most."""

    def keys(self) -> set[str]:
        return set(self.roots())

    def roots(self, medium: str = DEVICE) -> dict[str, str]:
        """Return the keys of all that it holds now, as the control API writes them -> the first keys of their chains.
        vLLM counts the copies of a block; for SGLang one removal is the end of it. ``medium``: of the device's memory,
        or of a lower tier.
        """
        copies: Counter[int] = Counter()
        key_of: dict[int, int] = {}
        root_of: dict[int, int] = {}
        windows = WindowBlocks()
        self.removed = 0
        decode = adapter(self._kind).decode_batch
        for event in of_one_group(
            [event for _, payload in replay(self._ip, self.rank) for event in decode(payload).events]
        ):
            match event:
                case Stored() | Ragged():
                    if isinstance(event, Ragged):
                        # The event does not say which of its tokens its blocks are: the sidecar's own code finds out.
                        hashes, keys, rest = windows.place(event, lambda _, salt: self._seed(salt=salt))
                        assert not rest, f"{len(rest)} hashes of a ragged event are not explained"
                    else:
                        hashes = event.hashes
                        parent = self._parent(event, key_of, windows)
                        keys = chain(event.ids, event.block_size, len(hashes), event.extras, parent)
                        if event.window:
                            windows.follow(event, keys)
                    key_of.update(zip(hashes, keys, strict=True))
                    beginning = None if event.parent is None else key_of.get(event.parent)
                    root_of.update(dict.fromkeys(keys, root_of.get(beginning, keys[0]) if keys else 0))
                    copies.update(hashes if event.medium == medium else ())
                    self.most_copies = max(self.most_copies, *copies.values(), 0)
                case Removed() if event.medium == medium:
                    for block in event.hashes:
                        copies[block] = copies[block] - 1 if self._kind == "vllm" else 0
                    self.removed += len(event.hashes)
                case Cleared():
                    copies.clear()
        assert min(copies.values(), default=0) >= 0
        held = [key_of[block] for block, count in copies.items() if count]
        return {f"{key:016x}": f"{root_of[key]:016x}" for key in held}

    def _parent(self, event: Stored, key_of: Mapping[int, int], windows: WindowBlocks) -> int:
        """Return the key before the event's first block. A window's engine may never have stored that block."""
        if event.parent is None:
            return self._seed(salt=event.salt)
        key = key_of.get(event.parent) or windows.key(event.parent)
        assert key is not None, f"the parent {event.parent} was never published"
        return key


def of_one_group(events: Sequence[Any]) -> Iterator[Any]:
    """Yield the events of the cache group that has every block of a prompt: full attention, if there is any."""
    kinds = {event.group: event.kind for event in events if isinstance(event, Stored)}
    decides = min((group for group, kind in kinds.items() if kind in FULL_KINDS), default=min(kinds, default=0))
    return (event for event in events if getattr(event, "group", decides) == decides)


class Answer:
    """One answered request: what the router predicted and decided, and what the engine said."""

    def __init__(
        self, case: Case, headers: Mapping[str, str], usage: Mapping[str, Any], decision: dict[str, Any]
    ) -> None:
        self.case, self.worker = case, headers["x-mmrouter-worker"]
        self.exactness = headers["x-mmrouter-exactness"]
        names = ("overlap-blocks", "prompt-blocks", "prompt-tokens")
        self.overlap, self.blocks, self.predicted_tokens = (int(headers[f"x-mmrouter-{name}"]) for name in names)
        self.decision, self.keys, self.rank = decision, list(decision["keys"]), int(decision["rank"])
        self.tokens = int(usage["prompt_tokens"])
        self.cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        size = self.block_size
        self.most = (self.tokens - 1) // size * size
        """Of a whole hit: the engine always computes the last token."""
        self.promised = min(self.overlap * size, self.most)
        """The overlap in tokens."""

    @property
    def before_image(self) -> int:
        """Blocks of the text before the first image."""
        return int(self.decision["images"][0]["offset"]) // self.block_size

    @property
    def block_size(self) -> int:
        return int(self.decision["block_size"])


def send(deployment: Deployment, case: Case, max_tokens: int = 2) -> Answer:
    """Send a request through the router."""
    client = deployment.client(max_retries=0)
    body = dict(case.body)
    messages = body.pop("messages")
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=messages, max_tokens=max_tokens, temperature=0, extra_body=body
    )
    return Answer(case, raw.headers, raw.parse().usage.model_dump(), deployment.decision(raw))


def wait_until_published(deployment: Deployment, seen: Answer) -> None:
    """Every frontend's index holds every predicted key for the worker: the engine has published each of them."""
    (uid,) = (worker["uid"] for worker in deployment.state()["workers"] if worker["name"] == seen.worker)
    for number in range(len(deployment.controls)):

        def published(number: int = number) -> bool:
            return set(seen.keys) <= set(deployment.keys(uid, number)["keys"].get(str(seen.rank), ()))

        wait_for(published, AGREE_SECONDS, f"{seen.case.name}: every predicted key is published")
