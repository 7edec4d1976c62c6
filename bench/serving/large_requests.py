"""What other requests than a short text cost a router process: long prompts, many clients at once, a picture.

Like :mod:`bench.serving.proxy_overhead`, with a second mmrouter process whose policy is kv. All targets take turns in
every round.
"""

import base64
import struct
import sys
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from bench.command_child import Child
from bench.feed.fake_sidecars import FRONTEND, Curve, FeedEnds, address
from bench.peers.environment import SGLANG_ROUTER, SMG, PeerMissingError
from bench.rows import Row, not_run, percentile, row
from bench.serving.proxy_overhead import CONNECTIONS, DIRECT, ENGINE_PORT, OURS, PAUSE_MS, compare
from bench.serving.router_processes import Ours, Process, rust

ROUNDS = 4
STREAMS = 4
"""Per connection, round and target."""
PLAIN = 40
IMAGES, IMAGE_CONNECTIONS = 25, 4
IMAGE_BYTES = 1_050_000
"""1.4 MB as base64."""
REPEATS = 11
"""Of the load generator's prompt: a thousand tokens of the bench's tokenizer."""
KV = "mmrouter, policy kv"


@dataclass
class Measured:
    """What was seen of one target. CPU in seconds."""

    us: list[float] = field(default_factory=list)
    short_cpu: float = 0.0
    long_cpu: float = 0.0
    tokens: int = 0
    image_cpu: float = 0.0
    images: int = 0


def run() -> list[Row]:
    """Measure all routers that can be run here."""
    curve = Curve.fresh()
    missing: list[str] = []
    with ExitStack() as stack:
        command = [sys.executable, "-m", "bench.serving.plain_engine", address(0), str(ENGINE_PORT)]
        targets = {DIRECT: Process("engine", command, address(0), ENGINE_PORT)}
        stack.enter_context(FeedEnds(1, curve))
        targets[OURS] = Ours(FRONTEND, [address(0)], curve, policy="roundRobin")
        targets[KV] = Ours(address(900), [address(0)], curve, policy="kv")
        for peer in (SGLANG_ROUTER, SMG):
            try:
                targets[str(peer)] = rust(peer, [f"http://{address(0)}:{ENGINE_PORT}"])
            except PeerMissingError as error:
                missing.append(str(error))
        for target in targets.values():
            stack.enter_context(target).wait()
        load = stack.enter_context(Child("load generator", [sys.executable, "-m", "bench.serving.load_client"]))
        return rows(measure(load, targets), missing)


def measure(load: Child, targets: dict[str, Process]) -> dict[str, Measured]:
    """Let every target take its turn in every round."""
    seen = {name: Measured() for name in targets}
    image = picture(IMAGE_BYTES)
    for _ in range(ROUNDS):
        for name, target in targets.items():
            if name != KV:
                asked = load.call("plains", host=target.host, port=target.port, connections=CONNECTIONS, count=PLAIN)
                seen[name].us += asked["us"]
        for name in (OURS, KV):
            for repeats in (1, REPEATS):
                cpu, tokens = _stream(load, targets[name], repeats)
                if repeats == 1:
                    seen[name].short_cpu += cpu
                    seen[name].tokens += tokens
                else:
                    seen[name].long_cpu += cpu
        for name, target in targets.items():
            if name != DIRECT:
                before = target.cpu()
                asked = load.call(
                    "plains",
                    host=target.host,
                    port=target.port,
                    connections=IMAGE_CONNECTIONS,
                    count=IMAGES,
                    image=image,
                )
                seen[name].image_cpu += target.cpu() - before
                seen[name].images += len(asked["us"])
    return seen


def rows(seen: dict[str, Measured], missing: Sequence[str]) -> list[Row]:
    """Return our figures and their ratios."""
    peers = {name: measured for name, measured in seen.items() if name not in (DIRECT, OURS, KV)}
    found: list[Row] = []
    for share, name, goal in ((0.5, "p50", "<= 0.6"), (0.99, "p99", "<= 1.0")):
        floor = percentile(seen[DIRECT].us, share)
        added = {peer: percentile(measured.us, share) - floor for peer, measured in peers.items()}
        own = percentile(seen[OURS].us, share) - floor
        found += compare(f"proxy, plain JSON, {CONNECTIONS} connections: added {name}", own, added, missing, goal)
    plain = seen[OURS].short_cpu / seen[OURS].tokens * 1e6
    name = f"proxy, paced {PAUSE_MS} ms, {CONNECTIONS} connections: CPU per token, policy kv"
    long: tuple[str, float, str | None] = ("1k-token prompt", seen[KV].long_cpu, "<= 1.3")
    for prompt, cpu, bound in (("short prompt", seen[KV].short_cpu, None), long):
        own = cpu / seen[KV].tokens * 1e6
        found.append(row(f"{name}, {prompt}", own, "us"))
        peer = f"the same process, policy roundRobin, short prompt: {plain:.4g} us"
        found.append(row(f"{name}, {prompt}, over roundRobin", own / plain, "x", peer=peer, goal=bound))
    smg = {peer: measured for peer, measured in peers.items() if peer.startswith(SMG.package)}
    for ours, policy, goal in ((OURS, "roundRobin", "<= 1.0"), (KV, "kv", "<= 1.8")):
        name = f"proxy, 1.4 MB image, {IMAGE_CONNECTIONS} connections: CPU per request, policy {policy}"
        own = seen[ours].image_cpu / seen[ours].images * 1e6
        found.append(row(name, own, "us"))
        if not smg:
            found.append(not_run(f"{name}, over smg", "x", "; ".join(missing), goal=goal))
        for peer, measured in smg.items():
            theirs = measured.image_cpu / measured.images * 1e6
            words = f"{peer}: {theirs:.4g} us, of which it looks at nothing"
            found.append(row(f"{name}, over smg", own / theirs, "x", peer=words, goal=goal))
    return found


def picture(size: int) -> str:
    """Return a PNG of about ``size`` bytes as a data URI: few pixels, so that what is seen is its transport.

    Its bytes lie in a chunk that every reader skips, as a colour profile does.
    """

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    side = 56
    lines = zlib.compress(b"".join(b"\0" + bytes(3 * side) for _ in range(side)))
    noise = bytes(byte % 251 for byte in range(251)) * (size // 251)
    png = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    png += part(b"teXt", noise) + part(b"IDAT", lines) + part(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _stream(load: Child, target: Process, repeats: int) -> tuple[float, int]:
    before = target.cpu()
    asked = load.call(
        "streams",
        host=target.host,
        port=target.port,
        connections=CONNECTIONS,
        count=STREAMS,
        pause_ms=PAUSE_MS,
        repeats=repeats,
    )
    return target.cpu() - before, asked["tokens"]
