"""Cost of larger requests in a router process: long prompts, many clients at once, a picture.

Like :mod:`bench.serving.proxy_overhead`, with a second mmrouter process whose policy is kv. All targets take turns in
every round.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.feed.fake_sidecars import address
from bench.measured_process import Child
from bench.peers.peer_installation import SMG
from bench.pictures import padded_png
from bench.rows import Row, not_run, row
from bench.serving.proxy_overhead import CONNECTIONS, DIRECT, OURS, PAUSE_MS, latency_rows, stream
from bench.serving.router_processes import CpuCost, Process, ServingRig

ROUNDS = 4
STREAMS = 4
"""Per connection, round and target."""
PLAIN = 40
IMAGES, IMAGE_CONNECTIONS = 25, 4
IMAGE_BYTES = 1_050_000
"""1.4 MB as base64."""
REPEATS = 11
"""Of the load generator's prompt: a thousand tokens of the benchmark's tokenizer."""
KV = "mmrouter, policy kv"


@dataclass
class RequestCosts:
    """Measurements of one target: microseconds of plain answers, and CPU of streams and of requests with images."""

    us: list[float] = field(default_factory=list)
    short: CpuCost = field(default_factory=CpuCost)
    long: CpuCost = field(default_factory=CpuCost)
    images: CpuCost = field(default_factory=CpuCost)


def run() -> list[Row]:
    """Measure all routers that can be run here."""
    with ServingRig() as rig:
        targets: dict[str, Process] = {
            DIRECT: rig.engine,
            OURS: rig.start(rig.ours(policy="roundRobin")),
            KV: rig.start(rig.ours(address(900), policy="kv")),
        }
        targets |= {str(peer): rig.start(rig.rust_router(peer)) for peer in rig.rust_routers()}
        return rows(measure(rig.load_generator(), targets), rig.missing)


def measure(load: Child, targets: Mapping[str, Process]) -> dict[str, RequestCosts]:
    """Let every target take its turn in every round."""
    costs = {name: RequestCosts() for name in targets}
    image = "data:image/png;base64," + base64.b64encode(padded_png(IMAGE_BYTES)).decode()
    for _ in range(ROUNDS):
        for name, target in targets.items():
            if name != KV:
                costs[name].us += load.call("plain", **target.address, connections=CONNECTIONS, count=PLAIN)["us"]
        for name in (OURS, KV):
            stream(costs[name].short, load, targets[name], STREAMS)
            stream(costs[name].long, load, targets[name], STREAMS, repeats=REPEATS)
        for name, target in targets.items():
            if name != DIRECT:
                before = target.cpu()
                load.call("plain", **target.address, connections=IMAGE_CONNECTIONS, count=IMAGES, image=image)
                costs[name].images.add(target.cpu() - before, IMAGE_CONNECTIONS * IMAGES)
    return costs


def rows(costs: dict[str, RequestCosts], missing: Sequence[str]) -> list[Row]:
    """Return our figures and their ratios."""
    latencies = {name: each.us for name, each in costs.items() if name != KV}
    result = latency_rows(latencies, f"{CONNECTIONS} connections", missing)
    base = costs[OURS].short.us
    peer = f"the same process, policy roundRobin, short prompt: {base:.4g} us"
    for prompt, usage, goal in (("short prompt", costs[KV].short, None), ("1k-token prompt", costs[KV].long, "<= 1.3")):
        name = f"proxy, paced {PAUSE_MS} ms, {CONNECTIONS} connections: CPU per token, policy kv, {prompt}"
        result.append(row(name, usage.us, "us"))
        result.append(row(f"{name}, over roundRobin", usage.us / base, "x", peer=peer, goal=goal))
    smg = next((name for name in costs if name.startswith(SMG.package)), None)
    for ours, policy, bound in ((OURS, "roundRobin", "<= 1.0"), (KV, "kv", "<= 1.8")):
        name = f"proxy, 1.4 MB image, {IMAGE_CONNECTIONS} connections: CPU per request, policy {policy}"
        result.append(row(name, costs[ours].images.us, "us"))
        if smg is None:
            result.append(not_run(f"{name}, over smg", "x", "; ".join(missing), goal=bound))
            continue
        theirs = costs[smg].images.us
        peer = f"{smg}: {theirs:.4g} us, without looking at the image"
        result.append(row(f"{name}, over smg", costs[ours].images.us / theirs, "x", peer=peer, goal=bound))
    return result
