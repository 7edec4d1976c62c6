"""That the index equals the engines' caches: what a frontend believes of a worker, and what its engine holds, as sets.

The simulated engine reports its own cache (``/sim/cache``), block by block with all that a key covers;
its keys are made here, from nothing that a sidecar or a router said. Events travel for a moment, so under load a
frontend's answer is compared with the engine's before and after it: it holds all that was held both times, and nothing
that was held neither time. Where nothing happens these are the same, and the comparison is equality.
"""

import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import httpx
from cluster.resources import get
from e2e.deploying import Deployed
from e2e.endpoints import CONTROL_PORT, at_pod
from waiting import repeating, wait_for

from mmrouter_lib.block_keys import Key, chain, namespace_seed, span_extra
from mmrouter_lib.media_identity import foreign_identity, from_wire
from mmrouter_operator.model.kinds import RESOURCE

ENGINE_PORT = 8000
EVERY_SECONDS = 0.02
ASK_SECONDS = 2.0
EQUAL = "the index equals the engines' caches"
Seeds = Callable[[str | None, str | None], Key]
Held = dict[str, set[Key]]
"""Rank -> keys."""
T = TypeVar("T")


def keys_of(cache: Mapping[str, Any], seed: Seeds) -> Held:
    """Return the keys of what an engine said that it holds (``/sim/cache``). ``seed``: of a LoRA and a salt."""
    return {rank: _keys_of(blocks, cache["block_size"], seed) for rank, blocks in cache["ranks"].items()}


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
    frontend: str
    worker: str


class Looker:
    """Asks the pods of a deployment that were there when it was made."""

    def __init__(self, deployed: Deployed, stack: ExitStack) -> None:
        secret = deployed.secret()
        self._engine_key = secret["engine.key"].decode().strip()
        self._token = secret["control.token"].decode()
        self._identity_key = secret["identity.key"]
        model = get(deployed.cluster, RESOURCE, deployed.namespace, deployed.name)["spec"]["model"]
        self._model, self._revision = model["id"], model.get("revision", "")
        self._http = stack.enter_context(httpx.Client(timeout=ASK_SECONDS, trust_env=False))

        def url(pod: dict[str, Any], port: int) -> str:
            return stack.enter_context(at_pod(deployed, pod, port))

        self.frontends = {_name(pod): url(pod, CONTROL_PORT) for pod in deployed.pods("frontend")}
        self.workers = {_name(pod): url(pod, ENGINE_PORT) for pod in deployed.pods("worker")}
        self._uids = {_name(pod): pod["metadata"]["uid"] for pod in deployed.pods("worker")}
        self.pairs = [Pair(frontend, worker) for frontend in self.frontends for worker in self.workers]

    def held(self, worker: str) -> Held:
        headers = {"authorization": f"Bearer {self._engine_key}"}
        answer = self._http.get(f"{self.workers[worker]}/sim/cache", headers=headers)
        return keys_of(answer.raise_for_status().json(), self._seed)

    def view(self, pair: Pair) -> "View":
        answer = self._control(pair.frontend, f"workers/{self._uids[pair.worker]}/keys").raise_for_status().json()
        held = {rank: {int(key, 16) for key in keys} for rank, keys in answer["keys"].items()}
        return View(answer["epoch"], answer["synced"], held)

    def state(self, frontend: str) -> dict[str, Any]:
        answer: dict[str, Any] = self._control(frontend, "state").raise_for_status().json()
        return answer

    def lost(self, request_id: str) -> set[str]:
        """Return the workers that ended under a request, which then went to another. Raises ``httpx.HTTPError``."""
        answer = self._control(next(iter(self.frontends)), f"decisions/{request_id}")
        if answer.status_code == 404:
            return set()
        attempts = answer.raise_for_status().json()["attempts"]
        return {each["worker"] for each in attempts if each["outcome"].startswith("engine_lost")}

    def _control(self, frontend: str, path: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {self._token}"}
        return self._http.get(f"{self.frontends[frontend]}/control/{path}", headers=headers)

    def look(self) -> list["Seen"]:
        """Compare every frontend with every engine; who does not answer differs, too."""
        began = time.time()
        before = {worker: _tried(self.held, worker) for worker in self.workers}
        views = {pair: _tried(self.view, pair) for pair in self.pairs}
        after = {worker: _tried(self.held, worker) for worker in self.workers}
        ended = time.time()
        return [
            Seen(pair, began, ended, _wrong(before[pair.worker], view, after[pair.worker]), *_size(view))
            for pair, view in views.items()
        ]

    def differences(self) -> list["Seen"]:
        return [seen for seen in self.look() if seen.wrong]

    def _seed(self, lora: str | None, salt: str | None) -> Key:
        return namespace_seed(self._identity_key, model=self._model, revision=self._revision, lora=lora, salt=salt)


@dataclass(frozen=True)
class View:
    """What a frontend believes that a worker holds, and the epoch that it has of it; ``synced``: all of that epoch."""

    epoch: int
    synced: bool
    held: Held


@dataclass(frozen=True)
class Seen:
    """One comparison, and when its round began and ended in seconds since 1970. ``wrong``: empty for equality, which
    takes a frontend that follows the worker. ``epoch`` and ``blocks``: what the frontend had then; -1 and 0 where it
    did not answer.
    """

    pair: Pair
    began: float
    ended: float
    wrong: str
    epoch: int
    blocks: int


@dataclass
class Watch:
    pairs: list[Pair]
    seen: list[Seen] = field(default_factory=list)

    def equal_since(self, moment: float, newer: Mapping[Pair, int], filled: str = "") -> float | None:
        """Return when the last of the pairs was first seen to be equal, of what was begun after ``moment``. A pair that
        is in ``newer`` has to be of an epoch after that one; what a frontend believes of the worker ``filled`` must be
        something.
        """
        first: dict[Pair, float] = {}
        for each in list(self.seen):
            counts = each.epoch > newer.get(each.pair, -1) and (each.blocks > 0 or each.pair.worker != filled)
            if each.began >= moment and not each.wrong and counts:
                first.setdefault(each.pair, each.ended)
        return max(first.values()) if len(first) == len(self.pairs) else None

    def again(
        self, moment: float, seconds: float, newer: Mapping[Pair, int] = MappingProxyType({}), filled: str = ""
    ) -> float:
        """Wait until all pairs were equal after ``moment``, as of :meth:`equal_since`; return how long after it. Raises
        ``TimeoutError``.
        """

        def last() -> str:
            return "\n".join(map(str, self.seen[-2 * len(self.pairs) :]))

        equal = wait_for(lambda: self.equal_since(moment, newer, filled), seconds, EQUAL, known=last)
        return float(equal - moment)


@contextmanager
def looking(deployed: Deployed) -> Iterator[Looker]:
    with ExitStack() as stack:
        yield Looker(deployed, stack)


@contextmanager
def watching(looker: Looker) -> Iterator[Watch]:
    watch = Watch(looker.pairs)
    with repeating(lambda: watch.seen.extend(looker.look()), EVERY_SECONDS):
        yield watch


def assert_equal(looker: Looker, seconds: float = 5.0) -> None:
    """The index of every frontend becomes what the engines hold, without a request under way."""
    wait_for(lambda: not looker.differences(), seconds, EQUAL, every=EVERY_SECONDS, known=looker.differences)


def _tried(ask: Callable[[Any], T], whom: Any) -> T | str:
    """Return an answer, or why there is none."""
    try:
        return ask(whom)
    except httpx.HTTPError as error:
        return repr(error)


def _wrong(before: Held | str, view: View | str, after: Held | str) -> str:
    if isinstance(before, str):
        return before
    if isinstance(view, str):
        return view
    if not view.synced:
        return f"epoch {view.epoch} is not followed yet"
    return after if isinstance(after, str) else difference(before, view.held, after)


def _size(view: View | str) -> tuple[int, int]:
    return (-1, 0) if isinstance(view, str) else (view.epoch, sum(map(len, view.held.values())))


def _name(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["name"])
