"""What a router process adds: latency of a plain answer, and CPU per streamed token, against Rust routers.

Ours is the process that a frontend pod runs, with feeds from sidecars and the whole way of a request, template and
tokenizer included; policy round robin, because that is what the others are set to. Engine and client are processes of
their own. All targets take turns in every round.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from bench.command_child import Child
from bench.feed.fake_sidecars import FRONTEND, Curve, FeedEnds, address
from bench.peers.environment import SGLANG_ROUTER, SMG, PeerMissingError
from bench.rows import Row, not_run, percentile, row
from bench.serving.router_processes import Ours, Process, rust

ROUNDS = 4
PLAIN = 250
"""Requests per round and target, one after the other on one connection."""
CONNECTIONS = 64
PAUSE_MS = 10
PACED, BURST = 4, 12
"""Streams per connection, round and target."""
ENGINE_PORT = 8000
DIRECT, OURS = "direct", "mmrouter"


@dataclass
class Measured:
    """What was seen of one target."""

    us: list[float] = field(default_factory=list)
    paced_cpu: float = 0.0
    paced_tokens: int = 0
    burst_cpu: float = 0.0
    burst_tokens: int = 0

    @property
    def paced(self) -> float:
        """CPU microseconds per token of paced streams."""
        return self.paced_cpu / self.paced_tokens * 1e6

    @property
    def burst(self) -> float:
        """CPU microseconds per token of streams that come as fast as they can."""
        return self.burst_cpu / self.burst_tokens * 1e6


def run() -> list[Row]:
    """Measure all routers that can be run here."""
    curve = Curve.fresh()
    missing: list[str] = []
    with ExitStack() as stack:
        engine = _start(stack, Process("engine", _engine(address(0)), address(0), ENGINE_PORT))
        stack.enter_context(FeedEnds(1, curve))
        targets = [engine, _start(stack, Ours(FRONTEND, [address(0)], curve, policy="roundRobin"))]
        for peer in (SGLANG_ROUTER, SMG):
            try:
                targets.append(_start(stack, rust(peer, [f"http://{address(0)}:{ENGINE_PORT}"])))
            except PeerMissingError as error:
                missing.append(str(error))
        load = stack.enter_context(Child("load generator", [sys.executable, "-m", "bench.serving.load_client"]))
        seen = measure(load, targets)
    return rows(seen, missing)


def measure(load: Child, targets: Sequence[Process]) -> dict[str, Measured]:
    """Let every target take its turn in every round; the first one is the engine itself."""
    names = [DIRECT, *(target.name for target in targets[1:])]
    seen = {name: Measured() for name in names}
    for _ in range(ROUNDS):
        for name, target in zip(names, targets, strict=True):
            seen[name].us += load.call("plain", host=target.host, port=target.port, count=PLAIN)["us"]
        for name, target in zip(names[1:], targets[1:], strict=True):
            cpu, tokens = _stream(load, target, PACED, PAUSE_MS)
            seen[name].paced_cpu += cpu
            seen[name].paced_tokens += tokens
            cpu, tokens = _stream(load, target, BURST, None)
            seen[name].burst_cpu += cpu
            seen[name].burst_tokens += tokens
    return seen


def rows(seen: dict[str, Measured], missing: Sequence[str]) -> list[Row]:
    """Return our figures, and their ratios to the better of the peers."""
    ours, direct = seen[OURS], seen[DIRECT]
    peers = {name: measured for name, measured in seen.items() if name not in (OURS, DIRECT)}
    found: list[Row] = []
    for share, name, goal in ((0.5, "p50", "<= 0.6"), (0.99, "p99", "<= 1.0")):
        floor = percentile(direct.us, share)
        added = {peer: percentile(measured.us, share) - floor for peer, measured in peers.items()}
        found += compare(
            f"proxy, plain JSON, 1 connection: added {name}", percentile(ours.us, share) - floor, added, missing, goal
        )
    for name, mine, theirs, bound in (
        (f"paced {PAUSE_MS} ms", ours.paced, {peer: m.paced for peer, m in peers.items()}, "<= 1.0"),
        ("burst", ours.burst, {peer: m.burst for peer, m in peers.items()}, None),
    ):
        found += compare(f"proxy, {name}, {CONNECTIONS} connections: CPU per token", mine, theirs, missing, bound)
    return found


def compare(name: str, value: float, peers: dict[str, float], missing: Sequence[str], goal: str | None) -> list[Row]:
    own = row(name, value, "us")
    ratio = f"{name}, over the better Rust router"
    if not peers:
        return [own, not_run(ratio, "x", "; ".join(missing), goal=goal)]
    words = [f"{peer}: {theirs:.4g} us" for peer, theirs in peers.items()]
    words += [f"not run: {reason}" for reason in missing]
    return [own, row(ratio, value / min(peers.values()), "x", peer="; ".join(words), goal=goal)]


def _stream(load: Child, target: Process, count: int, pause_ms: int | None) -> tuple[float, int]:
    """Return CPU seconds of the target and tokens that it passed on."""
    before = target.cpu()
    answer = load.call(
        "streams", host=target.host, port=target.port, connections=CONNECTIONS, count=count, pause_ms=pause_ms
    )
    return target.cpu() - before, answer["tokens"]


def _start(stack: ExitStack, process: Process) -> Process:
    stack.enter_context(process)
    process.wait()
    return process


def _engine(host: str) -> list[str]:
    return [sys.executable, "-m", "bench.serving.plain_engine", host, str(ENGINE_PORT)]
