"""A deployment in virtual time under drawn faults, whose decisions and caches are checked as they happen."""

import random
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from campaign.index.history import FOREVER, Decision, IndexChecker, Record
from campaign.index.network import Act, Link, Node, VirtualTime, Weather
from campaign.index.nodes import BLOCK, EngineNode, Prompt, RouterNode, SidecarNode

from mmrouter_lib import feed
from mmrouter_lib.block_keys import block_keys, chain
from mmrouter_sidecar.settings import CurveKeys, Settings
from mmrouter_sim.core.caches import Block
from mmrouter_sim.core.events import VllmDialect
from mmrouter_sim.core.requests import Request

START: Final = 1.7e9  # seconds since 1970 at the beginning of virtual time
DIALECT: Final = VllmDialect(BLOCK)
KEY: Final = bytes(range(32))


@dataclass(frozen=True)
class Plan:
    """Size of a deployment, and how often what happens. Rates are per second.

    ``lag``: seconds by which a view may lag behind. In a storm the sidecar finds a lost batch within 2 s of silence,
    the router a lost delta within 2 s of silence, and its request for it may stay unanswered for 2.5 s until the index
    is stale. Without storms only the 2.5 s count, after which a silent sidecar's index is stale.
    """

    engines: int = 3
    routers: int = 2
    blocks: int = 64  # of an engine's cache, the reserved one included
    prompts: int = 120
    buffer: int = 60  # batches that an engine can replay
    decisions: float = 200.0
    requests: float = 12.0
    faults: float = 0.4
    lag: float = 8.0
    storms: bool = True  # whether links lose, delay, repeat and reorder messages


def draw_prompts(dice: random.Random, settings: Settings, count: int) -> list[Prompt]:
    """Return prompts that share beginnings, as conversations do."""
    made: list[array[int]] = []
    for _ in range(count):
        base = dice.choice(made) if made and dice.random() < 0.8 else array("I")
        head = base[: dice.randrange(len(base) + 1)]
        made.append(head + array("I", [dice.randrange(50) for _ in range(dice.randint(BLOCK, 5 * BLOCK))]))
    prompts = []
    for ids in (ids[: 12 * BLOCK] for ids in made):
        request = Request("", ids, lambda number: number, 1)
        DIALECT.extend(request)
        keys = block_keys(ids, BLOCK, (), settings.seed(None, None))
        prompts.append(Prompt(ids, tuple(request.digests), keys))
    return prompts


@dataclass
class Pod:
    """An engine and its sidecar. ``whole``: no event of the engine was lost for its sidecar. ``partial_until``: until
    when a router may know a part of the cache, because its sidecar began anew and reads the engine's past.
    """

    name: str
    settings: Settings
    engine: EngineNode | None = None
    sidecar: SidecarNode | None = None
    whole: bool = True
    partial_until: float = 0.0
    clock_step: float = 0.0
    to_sidecar: Link | None = None
    links: dict[RouterNode, Link] = field(default_factory=dict)

    def denies(self, now: float) -> bool:
        """Whether a block that a router does not know is a block that the engine does not hold."""
        return self.whole and now >= self.partial_until


class World:
    """Everything that happens follows from the seed. ``folder`` gets the sidecars' journals."""

    def __init__(self, seed: str, folder: Path, plan: Plan) -> None:
        self.plan, self.time, self._dice = plan, VirtualTime(), random.Random(seed)
        self.checker = IndexChecker(horizon=plan.lag + 60)
        self.counts: Counter[str] = Counter()
        self.weather = Weather(), Weather()  # from engines to sidecars; between sidecars and routers
        self._lives = 0
        self._slack: dict[RouterNode, float] = {}  # until when the view may be older, because the router was paused
        self.pods = [Pod(f"engine-{n}", _settings(f"engine-{n}", folder)) for n in range(plan.engines)]
        self._prompts = draw_prompts(self._dice, self.pods[0].settings, plan.prompts)
        for pod in self.pods:
            self._start_sidecar(pod)
            self._start_engine(pod)
        self.routers = [self._new_router() for _ in range(plan.routers)]
        everyone = Node(self.time)
        for rate, act in ((plan.decisions, self._decide), (plan.faults, self._fault), (plan.requests, self._request)):
            if rate:
                self._poisson(everyone, rate, act)
        self._calm = everyone

    def run(self, seconds: float) -> None:
        self.time.run(self.time.now + seconds)

    def settle(self, seconds: float = 40.0) -> None:
        """End requests and faults, and run until every process is up to date."""
        self._calm.alive = False
        for weather in self.weather:
            weather.__dict__.update(Weather().__dict__)
        for link in (link for pod in self.pods for link in pod.links.values()):
            link.weather.cut_until = 0.0
        self.run(seconds)

    def differences(self) -> list[str]:
        """Return where a router's index differs from the cache of an engine. Only after :meth:`settle`."""
        found = []
        for pod in self.pods:
            assert pod.engine is not None
            held = _keys_of(pod.engine, pod.settings)
            for router in self.routers:
                worker = router.workers[pod.name]
                mine = router.held(worker)
                if not worker.routable:
                    found.append(f"{router.reader} does not use {pod.name}")
                elif mine - held or (pod.whole and held - mine):
                    found.append(
                        f"{router.reader}, {pod.name}: {len(mine - held)} too many, {len(held - mine)} missing"
                    )
        return found

    def _record(self, record: Record) -> None:
        self.checker.take(record)

    def _poisson(self, node: Node, rate: float, act: Act) -> None:
        def again() -> None:
            act()
            node.act_after(self._dice.expovariate(rate), again)

        node.act_after(self._dice.expovariate(rate), again)

    def _decide(self) -> None:
        router = self._dice.choice(self.routers)
        prompt = self._dice.choice(self._prompts)
        router.act(lambda: self._read(router, prompt))

    def _read(self, router: RouterNode, prompt: Prompt) -> dict[str, int]:
        overlaps = router.overlaps(prompt)
        now = self.time.now
        slack = max(0.0, self._slack.get(router, 0.0) - now)
        self.counts["decisions"] += 1
        for pod in self.pods:
            if pod.name in overlaps:
                read = prompt.names, overlaps[pod.name]
                self._record(Decision(router.reader, pod.name, now, *read, self.plan.lag, pod.denies(now), slack))
        return overlaps

    def _request(self) -> None:
        router = self._dice.choice(self.routers)
        prompt = self._dice.choice(self._prompts)

        def place() -> None:
            overlaps = self._read(router, prompt)
            if overlaps:
                best = max(overlaps, key=lambda name: (overlaps[name], self._dice.random()))
                engine = next(pod.engine for pod in self.pods if pod.name == best)
                if engine is not None and engine.alive:
                    engine.act(lambda: engine.ask(prompt, self._dice.randint(1, 2 * BLOCK)))

        router.act(place)

    def _start_engine(self, pod: Pod) -> None:
        def publish(seq: int, payload: bytes) -> None:
            sidecar, link = pod.sidecar, pod.to_sidecar
            if sidecar is not None and link is not None:
                link.send(lambda: sidecar.live(seq, payload) if pod.engine is engine else None)

        engine = pod.engine = EngineNode(
            self.time,
            pod.name,
            blocks=self.plan.blocks,
            buffer=self.plan.buffer,
            record=self._record,
            publish=publish,
            dice=random.Random(self._dice.random()),
        )
        pod.whole = True
        self._connect(pod)

    def _connect(self, pod: Pod) -> None:
        """Connect the engine's publisher to the sidecar."""
        sidecar, engine = pod.sidecar, pod.engine
        if sidecar is None or engine is None:
            return
        link = Link(self.time, self._dice, sidecar, self.weather[0])

        def connected() -> None:
            if pod.engine is engine and pod.sidecar is sidecar and engine.alive:
                pod.to_sidecar = link
                sidecar.connected()

        sidecar.act_after(0.02, connected)

    def _end_engine(self, pod: Pod, pause: float) -> None:
        engine, sidecar = pod.engine, pod.sidecar
        if engine is None:
            return
        engine.end()
        pod.engine = pod.to_sidecar = None
        if sidecar is not None:
            sidecar.act_after(0.005, sidecar.disconnected)
        self.time.after(pause, lambda: self._start_engine(pod))

    def _start_sidecar(self, pod: Pod) -> None:
        def fetch(sidecar: SidecarNode, first: int) -> None:
            engine, number = pod.engine, sidecar.replay

            def answer() -> None:
                batches = [each for each in engine.sent if each[0] >= first] if engine is not None else []
                self.time.after(0.001, lambda: sidecar.act(lambda: replayed(batches)))

            def replayed(batches: list[tuple[int, bytes]]) -> None:
                sidecar.replayed(number, batches)
                pod.partial_until = min(pod.partial_until, self.time.now + self.plan.lag)

            if engine is not None:
                engine.act_after(0.001, answer)

        def publish(frame: feed.Published) -> None:
            if pod.sidecar is not None and not pod.sidecar.alive:
                return
            payload = feed.encode(frame)
            for router, link in pod.links.items():
                link.send(lambda router=router: router.published(pod.name, payload))

        def lost() -> None:
            pod.whole = False

        clock_step = pod.clock_step  # a process keeps the step that it saw; the wall clock has it anyway
        pod.sidecar = SidecarNode(
            self.time,
            pod.settings,
            publish=publish,
            fetch=fetch,
            lost=lost,
            clock=lambda: START + self.time.now + max(clock_step, pod.clock_step, key=abs),
        )
        self._connect(pod)

    def _end_sidecar(self, pod: Pod, pause: float, *, journal: bool) -> None:
        sidecar = pod.sidecar
        if sidecar is None:
            return
        sidecar.alive = False
        file = pod.settings.state_dir / "ledger.journal"
        written = file.read_bytes()
        sidecar.relay.close()  # it writes what a killed process could not
        if journal:
            file.write_bytes(written)
        else:
            file.unlink()
        pod.sidecar = pod.to_sidecar = None
        self.time.after(pause, lambda: self._restart_sidecar(pod))

    def _restart_sidecar(self, pod: Pod) -> None:
        self._start_sidecar(pod)
        if pod.sidecar is not None and not pod.sidecar.stream.resumed:
            # Without a journal, or with one from before the engine's first event, it knows no block until a replay.
            pod.partial_until = FOREVER

    def _new_router(self) -> RouterNode:
        self._lives += 1
        router = RouterNode(self.time, f"router-{self._lives}", [pod.name for pod in self.pods])
        for pod in self.pods:
            pod.links[router] = Link(self.time, self._dice, router, self.weather[1])
        router.follow(self._ask)
        return router

    def _ask(self, router: RouterNode, name: str, request: feed.Request) -> None:
        pod = next(pod for pod in self.pods if pod.name == name)
        sidecar, weather = pod.sidecar, self.weather[1]
        back = pod.links[router]
        if sidecar is None:
            return

        def answer() -> None:
            for reply in sidecar.relay.answer(request):
                payload = feed.encode(reply)
                if not back.send(lambda payload=payload: router.replied(name, payload), reliable=True):
                    return
                if weather.loss and self._dice.random() < weather.loss:
                    return  # the rest of the answer is lost

        Link(self.time, self._dice, sidecar, back.weather).send(answer)

    def _fault(self) -> None:
        dice, pod = self._dice, self._dice.choice(self.pods)
        storms = ("storm on the feed", "storm on the events", "partition") if self.plan.storms else ()
        kind = dice.choice(
            (
                *("engine killed", "sidecar killed", "sidecar killed without journal", "both killed", "router killed"),
                *("engine stopped", "sidecar stopped", "router stopped", "clock step", "cache reset", *storms),
            )
        )
        self.counts[kind] += 1
        seconds = dice.choice((0.05, 0.5, 1.5, 3.0, 10.0)) * dice.uniform(0.5, 1.0)
        match kind:
            case "engine killed":
                self._end_engine(pod, seconds)
            case "sidecar killed":
                self._end_sidecar(pod, seconds, journal=True)
            case "sidecar killed without journal":
                self._end_sidecar(pod, seconds, journal=False)
            case "both killed":
                self._end_sidecar(pod, seconds, journal=dice.random() < 0.5)
                self._end_engine(pod, seconds * dice.random())
            case "router killed":
                router = dice.choice(self.routers)
                router.alive = False
                self.routers.remove(router)
                self._slack.pop(router, None)
                for each in self.pods:
                    del each.links[router]
                self.routers.append(self._new_router())
            case "engine stopped" | "sidecar stopped":
                node = pod.engine if kind == "engine stopped" else pod.sidecar
                if node is not None:
                    node.stand_still(seconds)
            case "router stopped":
                router = dice.choice(self.routers)
                self._pause(router, seconds)
            case "clock step":
                pod.clock_step += dice.choice((-86_400.0, -60.0, 60.0, 3600.0))
            case "cache reset":
                if pod.engine is not None:
                    pod.engine.act(pod.engine.reset)
                    pod.engine.act(lambda engine=pod.engine: engine.ask(dice.choice(self._prompts), 1))
            case "partition":
                self._cut(pod, seconds)
            case _:
                self._storm(self.weather[kind == "storm on the feed"], seconds)

    def _pause(self, router: RouterNode, seconds: float) -> None:
        """Pause a router; pauses that overlap, or follow before its view is up to date, add to each other's slack."""
        now = self.time.now
        before = max(now, router.stands_until)
        router.stand_still(seconds)
        self._slack[router] = max(now, self._slack.get(router, 0.0)) + 2 * (router.stands_until - before) + 1.0

    def _cut(self, pod: Pod, seconds: float) -> None:
        """Let nothing pass between one sidecar and one router."""
        link = pod.links[self._dice.choice(self.routers)]
        link.weather = Weather(**{**link.weather.__dict__, "cut_until": self.time.now + seconds})

        def mend() -> None:
            link.weather = self.weather[1]

        self.time.after(seconds, mend)

    def _storm(self, weather: Weather, seconds: float) -> None:
        dice = self._dice
        weather.loss, weather.twice = dice.choice((0.0, 0.02, 0.3)), dice.choice((0.0, 0.2))
        weather.jitter, weather.ordered = dice.choice((0.0, 0.05, 0.5)), dice.random() < 0.5
        self.time.after(3 * seconds, lambda: weather.__dict__.update(Weather().__dict__))


def _settings(name: str, folder: Path) -> Settings:
    return Settings(
        pod_uid=name,
        pod_ip="",
        loopback="",
        engine="vllm",
        model="model",
        revision="main",
        ranks=1,
        identity_key=KEY,
        curve=CurveKeys(b"", b"", ()),
        state_dir=folder / name,
        model_dir=folder,
        hub_dir=folder,
        secrets_dir=folder,
        buffer_events=200,
    )


def _keys_of(engine: EngineNode, settings: Settings) -> set[int]:
    """Return the keys of all blocks that an engine holds, from their tokens."""
    known: dict[bytes, int] = {}

    def key(block: Block) -> int:
        if block.digest not in known:
            parent = settings.seed(None, None) if block.parent is None else key(block.parent)
            known[block.digest] = chain(block.ids, BLOCK, 1, {}, parent)[0]
        return known[block.digest]

    return {key(block) for block, held in engine.scheduler.contents.with_ancestors() if held}
