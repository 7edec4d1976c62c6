"""The reported and the actual state of a running deployment: caches, processes, and the history of decisions."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
import zmq
from campaign.faults.cached_tokens import Claim, ClaimChecker, Placement
from campaign.faults.clock import unstepped
from campaign.index.history import CacheChange, Decision, IndexChecker, Record, Unobserved, check
from e2e.equality import Held, difference, keys_of

from mmrouter_lib.api import load_deployment
from mmrouter_lib.block_keys import Key, namespace_seed
from mmrouter_lib.cache_layout import cache_layout
from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_sidecar.blocks.ledger import Ledger

FRESH_SECONDS = 0.9
END = b"\xff" * 8
LAG = 4.5
"""Seconds by which a router's view may lag: 2.5 until a silent sidecar is stale, and a busy machine."""


def start_time(pid: int) -> float:
    """Return when a process began, in seconds since 1970; psutil's answer may be a second off."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    # A wait for a CPU between the two clocks makes the difference smaller.
    boot = max(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) for _ in range(5))
    return boot + ticks / os.sysconf("SC_CLK_TCK")


Frontend = Mapping[str, str]
"""``name`` of the pod, and ``control``: URL of its control API."""


class Observed(Protocol):
    """A deployment whose pods are processes of this machine. ``secrets``: folder of its keys, beside which its resource
    is, ``deployment.json``. ``processes``: pod name -> process, for ``router``, ``sidecar`` or ``vllm``.
    """

    @property
    def secrets(self) -> Path: ...

    @property
    def frontends(self) -> Sequence[Frontend]: ...

    def processes(self, command: str) -> dict[str, psutil.Process]: ...


class Observer:
    """Queries the processes of a deployment. Use it from one thread. ``workers_wanted``: the number of its engines.

    Indexes are compared with the caches of vLLM's engines. SGLang's lists have token ids without images, and encoders
    have no index.
    """

    def __init__(self, deployment: Observed) -> None:
        self.deployment = deployment
        folder = deployment.secrets
        self._token = (folder / "control.token").read_text().strip()
        self._engine_key = (folder / "engine.key").read_text().strip()
        self._identity_key = (folder / "identity.key").read_bytes()
        spec = load_deployment(folder.parent / "deployment.json").spec
        self._model, self._compares = spec.model, spec.engine.type == "vllm"
        self.workers_wanted = sum(pool.replicas for pool in spec.pools if pool.role != "renderer")
        self._http = httpx.Client(verify=False, trust_env=False, timeout=60)

    def close(self) -> None:
        self._http.close()

    def seed(self, lora: str | None, salt: str | None) -> Key:
        model = self._model
        return namespace_seed(self._identity_key, model=model.id, revision=model.revision, lora=lora, salt=salt)

    def control(self, path: str, frontend: Frontend) -> Any:
        """Return what a frontend's control API answers. Raises ``httpx.HTTPError``."""
        headers = {"authorization": f"Bearer {self._token}"}
        return self._http.get(f"{frontend['control']}{path}", headers=headers).raise_for_status().json()

    def workers(self, frontend: Frontend) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.control("/control/state", frontend)["workers"]
        return found

    def ready(self, frontend: Frontend) -> bool:
        host = httpx.URL(frontend["control"]).host
        return self._http.get(f"http://{host}:9090/readyz").status_code == 200

    def differences(self) -> list[str]:
        """Return where an index differs from an engine's cache, or a worker is not verified; no answer differs, too."""
        found = []
        for frontend in self.deployment.frontends:
            try:
                workers = self.workers(frontend)
                if len(workers) != self.workers_wanted:
                    found.append(f"{frontend['name']}: {len(workers)} workers")
                for worker in workers:
                    if worker["role"] == "encoder":
                        continue
                    before = self._cache(worker["ip"])
                    view = self.control(f"/control/workers/{worker['uid']}/keys", frontend)
                    held = {rank: {int(key, 16) for key in keys} for rank, keys in view["keys"].items()}
                    wrong = difference(before, held, self._cache(worker["ip"])) if self._compares else ""
                    # Routers use the index of a dead sidecar for two seconds; only a fresh frame shows that it runs.
                    silent = worker["heard_seconds_ago"] is None or worker["heard_seconds_ago"] > FRESH_SECONDS
                    if wrong or silent or not view["synced"] or worker["standing"] != "verified":
                        found.append(f"{frontend['name']}, {worker['name']}: {wrong or worker['standing']}")
            except (httpx.HTTPError, ValueError, KeyError) as error:
                found.append(f"{frontend['name']}: {type(error).__name__} {error}")
        return found

    def in_flight(self) -> list[str]:
        """Return where frontends count requests in flight; a frontend that does not answer, too."""
        found = []
        for frontend in self.deployment.frontends:
            try:
                for worker in self.workers(frontend):
                    if count := worker["in_flight"] + worker["in_flight_elsewhere"]:
                        found.append(f"{frontend['name']} counts {count} requests at {worker['name']}")
            except (httpx.HTTPError, ValueError) as error:
                found.append(f"{frontend['name']}: {type(error).__name__} {error}")
        return found

    def other_decisions(self, claims: Sequence[Claim], *, complete: bool) -> list[str]:
        """Look up answers' decisions at every frontend; return which are of another request, or unknown though
        ``complete``: no router's decisions were lost.
        """
        found = []
        for frontend in self.deployment.frontends:
            for claim in claims:
                name = f"{frontend['name']}, decision {claim.request_id}"
                try:
                    decision = self.control(f"/control/decisions/{claim.request_id}", frontend)
                except httpx.HTTPStatusError as error:
                    if complete or error.response.status_code != 404:
                        found.append(f"{name}: {error}")
                    continue
                seen = decision["request_id"], decision["prompt_tokens"]
                if seen != (claim.request_id, claim.prompt_tokens):
                    found.append(f"{name}: that of {seen}, and the prompt has {claim.prompt_tokens} tokens")
        return found

    def _cache(self, address: str) -> Held:
        if not self._compares:
            return {}
        headers = {"authorization": f"Bearer {self._engine_key}"}
        answer = self._http.get(f"http://{address}:8000/sim/cache", headers=headers)
        return keys_of(answer.raise_for_status().json(), self.seed)


@dataclass
class _Engine:
    """The events of one engine process, read from its replay socket as batches that it keeps."""

    address: str
    process: psutil.Process
    ledger: Ledger
    sent: float  # seconds since 1970, by the last batch
    observed: float
    next: int = 0
    held: set[Key] = field(default_factory=set)


class Recorder:
    """Records what engines publish and routers decide, with the time of this machine's clock.

    Their own clocks may have been set: what they publish is read soon, so the step is known from its time. Engines
    repeat their last 10,000 batches only, so a recorder lives as long as its deployment. Use it from one thread at a
    time.
    """

    def __init__(self, deployment: Observed) -> None:
        self._deployment, self._observer = deployment, Observer(deployment)
        self._engines: dict[str, _Engine] = {}
        self._decided: set[str] = set()
        self._context = zmq.Context()
        self._since = time.time()
        self._placements: dict[str, list[Placement]] = {}
        self.history: list[Record] = []
        self.stepped = 0  # times since the last begin that a set clock gave

    def close(self) -> None:
        self._observer.close()
        self._context.destroy(linger=0)

    def observe(self) -> None:
        """Take what happened since the last call. Engines and routers that do not answer are left for the next one."""
        running = {}
        for name, process in self._deployment.processes("vllm").items():
            with suppress(psutil.NoSuchProcess, FileNotFoundError):
                running[name] = process, process.environ()["POD_IP"], start_time(process.pid)
        for name, engine in list(self._engines.items()):
            if name not in running or running[name][0] != engine.process:
                self._ended(name, engine, running[name][2] if name in running else time.time())
        for name, (process, address, began) in running.items():
            if name not in self._engines:
                self._engines[name] = _Engine(address, process, Ledger(self._observer.seed), began, began)
            self._read(name, self._engines[name])
        for frontend in self._deployment.frontends:
            try:
                self._decisions(frontend["name"], self._observer.control("/control/decisions?count=400", frontend))
            except (httpx.HTTPError, ValueError):
                continue

    def begin(self) -> None:
        """Begin a new history with what the engines hold now; decisions count from then on."""
        self.observe()
        self.history = [
            CacheChange(name, engine.sent, engine.sent, tuple(engine.held)) for name, engine in self._engines.items()
        ]
        self._since, self.stepped = time.time(), 0
        self._placements.clear()

    def checked(self, slack: dict[str, float], delay: float = 0.0) -> IndexChecker:
        """Check the history. ``slack``: frontend -> additional seconds by which its view may lag; ``delay``: longest
        time that a process of this machine waited for a CPU. A view may be late by two: the sidecar's and the router's.
        """
        lag = LAG + 2 * delay
        records: list[Record] = []
        for each in self.history:
            if not isinstance(each, Decision):
                records.append(each)
            elif each.at >= self._since + lag:  # else its view may be older than the history
                records.append(replace(each, lag=lag, slack=slack.get(each.reader, 0.0)))
        return check(records)

    def claims(self, claims: Sequence[Claim], *, complete: bool) -> tuple[ClaimChecker, list[str]]:
        """Check what answers said of their prompts' cached tokens; return which of them are false. ``complete``: no
        router's log of decisions was lost.
        """
        checker = ClaimChecker(complete)
        return checker, checker.wrong(claims, self._placements, self.history)

    def _read(self, name: str, engine: _Engine) -> None:
        dealer = self._context.socket(zmq.DEALER)
        asked, number, batches = time.time(), b"", []
        try:
            dealer.linger, dealer.rcvhwm = 0, 0
            dealer.connect(f"tcp://{engine.address}:5657")
            dealer.send_multipart([b"", engine.next.to_bytes(8, "big")])
            while number != END and dealer.poll(500):
                *_, number, payload = dealer.recv_multipart()
                batches.append((int.from_bytes(number, "big"), payload))
        finally:
            dealer.close(0)
        if not engine.process.is_running():
            return  # the answer may be that of the next process at this address
        for place, payload in batches[: -1 if number == END else None]:
            self._apply(name, engine, place, payload)
        if number == END:
            engine.observed = asked

    def _apply(self, name: str, engine: _Engine, number: int, payload: bytes) -> None:
        batch = decode_batch(payload)
        sent = self._time(batch.sent)
        engine.ledger.apply(batch, 0)
        group = cache_layout(engine.ledger.groups).primary
        for place, stored, removed, cleared in engine.ledger.take().changes:
            if place.group != group or place.medium != "GPU":
                continue
            went = engine.held.copy() if cleared else set(removed)
            came = set(stored)
            engine.held = (engine.held - went) | came
            self.history.append(CacheChange(name, engine.sent, sent, tuple(came - went), tuple(went - came)))
        engine.next, engine.sent = number + 1, sent

    def _time(self, at: float) -> float:
        """Return the machine's time of a moment that a process gave."""
        real = unstepped(at, time.time())
        self.stepped += real != at
        return real

    def _ended(self, name: str, engine: _Engine, at: float) -> None:
        """Its last batches are unknown, and so is what it held before its end."""
        after = max(engine.sent, engine.observed)
        self.history.append(Unobserved(name, engine.observed, at))
        self.history.append(CacheChange(name, min(after, at), at, (), tuple(engine.held)))
        del self._engines[name]

    def _decisions(self, reader: str, decisions: list[dict[str, Any]]) -> None:
        for decision in decisions:
            if decision["predicted"] != "before":
                continue
            self._place(decision)
            if decision["request_id"] in self._decided:
                continue
            self._decided.add(decision["request_id"])
            at, names = self._time(decision["at"]), [int(key, 16) for key in decision["keys"]]
            for each in decision["candidates"]:
                if each["scored"]:
                    overlap = each["overlap"]
                    self.history.append(Decision(reader, each["worker"], at, names, overlap, LAG, denies=False))

    def _place(self, decision: dict[str, Any]) -> None:
        """Note at which engines a request was: where it is now, and where it was tried before."""
        request, tried = decision["request_id"], [attempt["worker"] for attempt in decision["attempts"]]
        known = self._placements.get(request)
        if known is None and request in self._decided:
            return  # before the last begin
        if known is not None and len(tried) <= max(1, known[0].tries):
            return
        keys = known[0].keys if known is not None else [int(key, 16) for key in decision["keys"]]
        at = self._time(decision["at"]) if len(tried) <= 1 else self._since
        self._placements[request] = [
            Placement(engine, at, keys, decision["block_size"], len(tried))
            for engine in sorted({decision["worker"], *tried})
        ]
