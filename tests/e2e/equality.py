"""That the index equals the engines' caches: what a frontend believes of a worker, and what its engine holds, as sets.

The engine's side is told by the simulated engine itself (``/sim/cache``), block by block with all that a key covers;
its keys are made here, from nothing that a sidecar or a router said. Events travel for a moment, so under load a
frontend's answer is compared with the engine's before and after it: it holds all that was held both times, and nothing
that was held neither time. Where nothing happens these are the same, and the comparison is equality.
"""

import base64
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from cluster.controlplane import wait_for
from e2e.deploying import Deployed
from e2e.plane import Node
from e2e.reach import CONTROL_PORT, address, forwarded

from mmrouter.blocks import Key, chain, namespace_seed, span_extra
from mmrouter.identity import foreign_identity, from_wire

ENGINE_PORT = 8000
EVERY_SECONDS = 0.02
ASK_SECONDS = 2.0
Seeds = Callable[[str | None, str | None], Key]
Held = dict[str, set[Key]]
"""Rank -> keys."""


def keys_of(told: Mapping[str, Any], seed: Seeds) -> Held:
    """Return the keys of what an engine said that it holds (``/sim/cache``). ``seed``: of a LoRA and a salt."""
    return {rank: _keys_of(blocks, told["block_size"], seed) for rank, blocks in told["ranks"].items()}


def _keys_of(blocks: list[dict[str, Any]], size: int, seed: Seeds) -> set[Key]:
    keys: list[Key] = []
    for block in blocks:
        parent = seed(block["lora"], block["salt"]) if block["parent"] is None else keys[block["parent"]]
        extra = b"".join(span_extra(from_wire(m) or foreign_identity(m), start) for m, start in block["media"])
        keys += chain(array("I", block["token_ids"]), size, 1, {0: extra} if extra else {}, parent)
    return {key for key, block in zip(keys, blocks, strict=True) if block["held"]}


def difference(before: Held, believed: Held, after: Held) -> str:
    """Return how a frontend's belief differs from a cache that was looked at before and after it; empty: not at all."""
    wrong = []
    for rank in sorted(before.keys() | believed.keys() | after.keys()):
        first, mine, last = (held.get(rank, set()) for held in (before, believed, after))
        lacks, claims = (first & last) - mine, mine - (first | last)
        if lacks or claims:
            wrong.append(f"rank {rank}: {len(lacks)} of {len(last)} held are not known, {len(claims)} are not held")
    return "; ".join(wrong)


@dataclass(frozen=True)
class Pair:
    """A frontend and a worker, by the names of their pods."""

    frontend: str
    worker: str


class Looker:
    """Asks the pods of a deployment that were there when it was made."""

    def __init__(self, deployed: Deployed, stack: ExitStack) -> None:
        secret = _secret(deployed)
        self._engine_key = secret["engine.key"].decode().strip()
        self._token = secret["control.token"].decode()
        self._identity_key = secret["identity.key"]
        path = f"/apis/mmrouter.io/v1alpha1/namespaces/{deployed.namespace}/mmrouterdeployments/{deployed.name}"
        model = deployed.cluster.request("GET", path).raise_for_status().json()["spec"]["model"]
        self._model, self._revision = model["id"], model.get("revision", "")
        self._http = stack.enter_context(httpx.Client(timeout=ASK_SECONDS, trust_env=False))

        def url(pod: dict[str, Any], port: int) -> str:
            if isinstance(deployed.cluster, Node) or _routed(pod, port):
                return f"http://{address(pod)}:{port}"
            return stack.enter_context(forwarded(deployed, f"pod/{pod['metadata']['name']}", port))

        self.frontends = {_name(pod): url(pod, CONTROL_PORT) for pod in deployed.pods("frontend")}
        self.workers = {_name(pod): url(pod, ENGINE_PORT) for pod in deployed.pods("worker")}
        self._uids = {_name(pod): pod["metadata"]["uid"] for pod in deployed.pods("worker")}
        self.pairs = [Pair(frontend, worker) for frontend in self.frontends for worker in self.workers]

    def held(self, worker: str) -> Held:
        """Return what an engine says that it holds. Raises ``httpx.HTTPError``."""
        headers = {"authorization": f"Bearer {self._engine_key}"}
        answer = self._http.get(f"{self.workers[worker]}/sim/cache", headers=headers)
        return keys_of(answer.raise_for_status().json(), self._seed)

    def believed(self, pair: Pair) -> Held:
        """Return what a frontend believes that a worker holds; nothing while it does not follow the worker's events.

        Raises ``httpx.HTTPError``.
        """
        headers = {"authorization": f"Bearer {self._token}"}
        url = f"{self.frontends[pair.frontend]}/control/workers/{self._uids[pair.worker]}/keys"
        answer = self._http.get(url, headers=headers).raise_for_status().json()
        return {rank: {int(key, 16) for key in keys} for rank, keys in answer["keys"].items() if answer["synced"]}

    def state(self, frontend: str) -> dict[str, Any]:
        """Return all that a frontend knows. Raises ``httpx.HTTPError``."""
        headers = {"authorization": f"Bearer {self._token}"}
        url = f"{self.frontends[frontend]}/control/state"
        answer: dict[str, Any] = self._http.get(url, headers=headers).raise_for_status().json()
        return answer

    def look(self) -> list["Seen"]:
        """Compare every frontend with every engine; who does not answer differs, too."""
        began = time.time()
        before = {worker: _tried(self.held, worker) for worker in self.workers}
        believed = {pair: _tried(self.believed, pair) for pair in self.pairs}
        after = {worker: _tried(self.held, worker) for worker in self.workers}
        ended = time.time()
        rows = [(pair, before[pair.worker], mine, after[pair.worker]) for pair, mine in believed.items()]
        return [Seen(pair, began, ended, _wrong(*helds)) for pair, *helds in rows]

    def differences(self) -> list["Seen"]:
        """Return where a frontend differs from an engine now."""
        return [seen for seen in self.look() if seen.wrong]

    def _seed(self, lora: str | None, salt: str | None) -> Key:
        return namespace_seed(self._identity_key, model=self._model, revision=self._revision, lora=lora, salt=salt)


@dataclass(frozen=True)
class Seen:
    """One comparison, and when its round began and ended in seconds since 1970. ``wrong``: empty for equality."""

    pair: Pair
    began: float
    ended: float
    wrong: str


@dataclass
class Watch:
    """The comparisons so far."""

    pairs: list[Pair]
    seen: list[Seen] = field(default_factory=list)

    def equal_since(self, moment: float) -> float | None:
        """Return when the last of the pairs was first seen to be equal, of what was begun after ``moment``."""
        first: dict[Pair, float] = {}
        for each in list(self.seen):
            if each.began >= moment and not each.wrong:
                first.setdefault(each.pair, each.ended)
        return max(first.values()) if len(first) == len(self.pairs) else None

    def again(self, moment: float, seconds: float) -> float:
        """Wait until all pairs were equal after ``moment``; return how long after it. Raises ``TimeoutError``."""
        what = "the index equals the engines' caches"
        try:
            wait_for(lambda: self.equal_since(moment) is not None, seconds, what)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n" + "\n".join(map(str, self.seen[-2 * len(self.pairs) :]))) from error
        return (self.equal_since(moment) or moment) - moment


@contextmanager
def looking(deployed: Deployed) -> Iterator[Looker]:
    """Look at a deployment until the block ends."""
    with ExitStack() as stack:
        yield Looker(deployed, stack)


@contextmanager
def watching(looker: Looker) -> Iterator[Watch]:
    """Compare all the time until the block ends, in the background."""
    watch, stop = Watch(looker.pairs), threading.Event()

    def run() -> None:
        while not stop.wait(EVERY_SECONDS):
            watch.seen += looker.look()

    thread = threading.Thread(target=run, name="watch")
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()


def assert_equal(looker: Looker, seconds: float = 5.0) -> None:
    """The index of every frontend becomes what the engines hold, without a request under way."""
    try:
        wait_for(lambda: not looker.differences(), seconds, "the index equals the engines' caches", every=EVERY_SECONDS)
    except TimeoutError as error:
        raise AssertionError(f"{error}: {looker.differences()}") from error


def _tried(ask: Callable[[Any], Held], whom: Any) -> Held | str:
    """Return an answer, or why there is none."""
    try:
        return ask(whom)
    except httpx.HTTPError as error:
        return repr(error)


def _wrong(before: Held | str, believed: Held | str, after: Held | str) -> str:
    if isinstance(before, str):
        return before
    if isinstance(believed, str):
        return believed
    return after if isinstance(after, str) else difference(before, believed, after)


def _name(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def _routed(pod: dict[str, Any], port: int) -> bool:
    try:
        httpx.get(f"http://{address(pod)}:{port}/health", timeout=1, trust_env=False)
    except (httpx.ConnectError, httpx.ConnectTimeout):
        return False
    return True


def _secret(deployed: Deployed) -> dict[str, bytes]:
    path = f"/api/v1/namespaces/{deployed.namespace}/secrets/{deployed.name}-secrets"
    data = deployed.cluster.request("GET", path).raise_for_status().json()["data"]
    return {name: base64.b64decode(value) for name, value in data.items()}
