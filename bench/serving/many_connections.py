"""Many clients at once: 2,000 streams that wait for their next token and 500 that get one every 50 ms.

Every stream must come whole, or the target has an error and no figure. The memory is that of the router's process when
all of it is under way, against Rust routers.
"""

import resource
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from bench.command_child import Child, ChildError
from bench.feed.fake_sidecars import FRONTEND, Curve, FeedEnds, address
from bench.peers.environment import SGLANG_ROUTER, SMG, PeerMissingError
from bench.rows import Row, not_run, row
from bench.serving.router_processes import Ours, Process, rust

IDLE, ACTIVE = 2000, 500
PAUSE_MS = 50
ENGINE_PORT = 8000
FILES = 4 * (IDLE + ACTIVE)
LOOKS_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Seen:
    """One router under the load: MiB at its most, the CPU seconds, and what went wrong."""

    mib: float = 0.0
    cpu: float = 0.0
    error: str = ""


def run() -> list[Row]:
    """Measure all routers that can be run here, one after the other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, hard), hard))
    curve = Curve.fresh()
    seen: dict[str, Seen] = {}
    missing: list[str] = []
    with ExitStack() as stack:
        engine = Process(
            "engine",
            [sys.executable, "-m", "bench.serving.plain_engine", address(0), str(ENGINE_PORT)],
            address(0),
            8000,
        )
        stack.enter_context(engine).wait()
        with FeedEnds(1, curve):
            seen["mmrouter"] = measure(Ours(FRONTEND, [address(0)], curve, policy="roundRobin"))
        for peer in (SGLANG_ROUTER, SMG):
            try:
                seen[str(peer)] = measure(rust(peer, [f"http://{address(0)}:{ENGINE_PORT}"]))
            except PeerMissingError as error:
                missing.append(str(error))
    return rows(seen, missing)


def measure(target: Process) -> Seen:
    """Put the load on a router and end it."""
    with target, ExitStack() as stack:
        target.wait()
        waits, asks = (
            stack.enter_context(Child("load generator", [sys.executable, "-m", "bench.serving.load_client"]))
            for _ in "ab"
        )
        most, done = [0.0], threading.Event()

        def look() -> None:
            while not done.wait(LOOKS_SECONDS):
                most.append(target.memory())

        looks = threading.Thread(target=look)
        before = target.cpu()
        try:
            waits.call("idle", host=target.host, port=target.port, connections=IDLE)
            looks.start()
            asks.call("streams", host=target.host, port=target.port, connections=ACTIVE, count=1, pause_ms=PAUSE_MS)
        except ChildError as error:
            return Seen(error=str(error))
        finally:
            done.set()
            if looks.is_alive():
                looks.join()
        return Seen(max(most), target.cpu() - before)


def rows(seen: dict[str, Seen], missing: Sequence[str]) -> list[Row]:
    """Return our figures, and the memory against the better of the peers without an error."""
    ours = seen["mmrouter"]
    name = f"connections, {IDLE:,} idle and {ACTIVE} active streams"
    peers = {peer: each for peer, each in seen.items() if peer != "mmrouter"}
    words = [f"{peer}: {each.error or f'{each.mib:.4g} MiB'}" for peer, each in peers.items()]
    failed = row(f"{name}: runs of ours with an error", float(bool(ours.error)), "", peer=ours.error, goal="<= 0")
    if ours.error:
        return [failed]
    found = [failed, row(f"{name}: resident", ours.mib, "MiB"), row(f"{name}: CPU", ours.cpu, "s")]
    whole = [each.mib for each in peers.values() if not each.error]
    ratio = f"{name}: resident, over the better Rust router"
    if not whole:
        return [*found, not_run(ratio, "x", "; ".join([*words, *missing]), goal="<= 1.5")]
    words += [f"not run: {reason}" for reason in missing]
    return [*found, row(ratio, ours.mib / min(whole), "x", peer="; ".join(words), goal="<= 1.5")]
