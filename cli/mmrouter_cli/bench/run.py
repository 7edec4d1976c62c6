"""One run against one endpoint: look at it, send the load, look again, and say what came of it."""

import asyncio
import contextlib
import datetime
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp

from mmrouter_cli.bench import endpoint, measure
from mmrouter_cli.bench import request as asking
from mmrouter_cli.bench.content import Writer
from mmrouter_cli.bench.endpoint import Endpoint
from mmrouter_cli.bench.pacing import AHEAD_SECONDS, MOST_UNDER_WAY, drive
from mmrouter_cli.bench.progress import Screen
from mmrouter_cli.bench.request import clock
from mmrouter_cli.bench.types import Answer, BenchError, Conversation, Events, Load, Result, Routing

SHORTEST = 1e-3
"""Seconds of a run that was stopped before its first request was due."""
MOST_WORKERS = 1_000
"""Names of engines that are counted each by itself."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Where a load goes, and as whom."""

    url: str
    salt: str
    timeout: float
    model: str | None = None
    policy: str | None = None
    api_key: str | None = None
    control: str | None = None
    token: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"content-type": "application/json"} | (
            {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        )


@dataclass(slots=True)
class Run:
    """What is known while a run goes on."""

    planned: int
    began: float
    sent: int = 0
    answers: list[Answer] = field(default_factory=list)
    gaps: measure.Sample = field(default_factory=measure.Sample)
    lags: measure.Sample = field(default_factory=lambda: measure.Sample(10_000))

    @property
    def in_flight(self) -> int:
        return self.sent - len(self.answers)


async def run(asked: Asked, load: Load, plan: Sequence[Conversation], left_out: int, screen: Screen) -> Result:
    """Send a plan and return what came of it; after ctrl-C what came until then.

    Raises ``BenchError`` where the endpoint does not answer at all.
    """
    async with asking.session(asked.timeout, load.concurrency or MOST_UNDER_WAY) as client:
        found = await endpoint.find(
            client,
            asked.url,
            asked.headers,
            model=asked.model,
            salt=asked.salt,
            control=asked.control,
            token=asked.token,
        )
        if asked.policy and found.reach is None:
            raise BenchError(f"a policy is for who has the control token: {found.why or 'this is no mmrouter'}")
        before = await _events(found)
        ahead = AHEAD_SECONDS if load.paced else 0.0
        state = Run(sum(len(conversation.turns) for conversation in plan), clock() + ahead)
        started = datetime.datetime.now(datetime.UTC)
        with _stopping() as stop:
            interrupted = await _sent(client, asked, found, load, plan, state, stop, screen)
        seconds = max(clock() - state.began, SHORTEST)
        after = await _events(found)
    answers = measure.whole(state.answers)
    late_share, latest = measure.lateness(state.answers)
    ratio, unknown = measure.hit_ratio(answers)
    return Result(
        url=asked.url,
        model=found.model,
        policy=asked.policy or "",
        began=started.isoformat(timespec="seconds"),
        salt=asked.salt,
        load=load,
        left_out=left_out,
        tokens_per_word=round(found.tokens_per_word, 4),
        seconds=seconds,
        interrupted=interrupted,
        sent=state.sent,
        answered=len(answers),
        unanswered=state.in_flight,
        failures=measure.failures(state.answers),
        prompt_tokens=sum(answer.prompt or 0 for answer in answers),
        completion_tokens=sum(a.completion if a.completion is not None else a.tokens_seen for a in answers),
        hit_ratio=ratio,
        hit_unknown=unknown,
        first_token=measure.spread([answer.first for answer in answers]),
        between_tokens=measure.spread(state.gaps.values, state.gaps.seen),
        per_token=measure.spread(measure.per_token(answers)),
        end_to_end=measure.spread([answer.total for answer in answers]),
        late_share=late_share,
        latest=latest,
        lag=(measure.quantiles(state.lags.values) or [0.0] * 101)[99],
        routing=_routing(found, answers, before, after) if found.routed else None,
        rows=measure.rows(answers),
        gaps=measure.quantiles(state.gaps.values),
    )


async def _sent(
    client: aiohttp.ClientSession,
    asked: Asked,
    found: Endpoint,
    load: Load,
    plan: Sequence[Conversation],
    state: Run,
    stop: asyncio.Event,
    screen: Screen,
) -> bool:
    """Send everything; returns whether that was cut short."""
    writer = Writer(asked.salt, found.tokens_per_word, found.model, ignore_eos=load.ignore_eos)
    headers = asked.headers
    if found.reach is not None:
        headers["x-mmrouter-control"] = found.reach.token
        if asked.policy:
            headers["x-mmrouter-policy"] = asked.policy

    async def talk(conversation: Conversation, due: float | None) -> None:
        for number, turn in enumerate(conversation.turns):
            if number:
                due = clock() + turn.pause if turn.pause else None
            # Drawing takes milliseconds, in which answers that come would be taken for late ones.
            body = await asyncio.to_thread(writer.body, conversation, number)
            late = None
            if due is not None:
                await asyncio.sleep(max(0.0, due - clock()))
                late = max(0.0, clock() - due)
            now = clock()
            state.sent += 1
            state.answers.append(
                await asking.ask(
                    client, asked.url, headers, body, started=now - state.began, late=late, gap=state.gaps.add
                )
            )

    driving = asyncio.create_task(drive(plan, load, state.began, talk))
    stopped = asyncio.create_task(stop.wait())
    beside = [asyncio.create_task(asking.lag(state.lags.add)), asyncio.create_task(screen.follow(state, asked.url))]
    try:
        await asyncio.wait((driving, stopped), return_when=asyncio.FIRST_COMPLETED)
        interrupted = not driving.done()
    finally:
        for task in (driving, stopped, *beside):
            task.cancel()
        await asyncio.gather(stopped, *beside, return_exceptions=True)
    with contextlib.suppress(asyncio.CancelledError):
        await driving  # what went wrong in it is raised here
    return interrupted


@contextlib.contextmanager
def _stopping() -> Iterator[asyncio.Event]:
    """Yield an event that ctrl-C, or the end of a pod, sets."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


Looked = tuple[Events, str, dict[str, str]]


async def _events(found: Endpoint) -> Looked:
    return ("unknown", found.why, {}) if found.reach is None else await endpoint.events(found.reach)


def _routing(found: Endpoint, answers: Sequence[Answer], before: Looked, after: Looked) -> Routing:
    """Return what an mmrouter said, and whether engines' events reached it from the first request to the last."""
    decisions = Counter(answer.exactness for answer in answers if answer.exactness)
    workers = Counter(answer.worker for answer in answers if answer.worker)
    events, why, _ = before if before[0] != "on" else after
    if events == "on":
        lost = [uid for uid, epoch in before[2].items() if after[2].get(uid, epoch) != epoch]
        if lost:
            events, why = "off", f"{len(lost)} engines lost their history meanwhile"
        elif answers and not decisions["exact"] + decisions["partial"]:
            events, why = "off", "no decision knew what engines hold: all were affinity"
    return Routing(events, why, dict(decisions), measure.overlap(answers), dict(workers.most_common(MOST_WORKERS)))
