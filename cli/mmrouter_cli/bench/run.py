"""One run against one endpoint: examine it, send the load, examine it again, and return the result."""

import asyncio
import contextlib
import datetime
import signal
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console

from mmrouter_cli.bench import run_statistics
from mmrouter_cli.bench.chat_stream import ask
from mmrouter_cli.bench.endpoint_probe import Endpoint, Events, Target, encoder_work, event_state, examine
from mmrouter_cli.bench.http_client import Client, clock
from mmrouter_cli.bench.terminal import follow
from mmrouter_cli.bench.types import Answer, BenchError, Conversation, EncoderWork, LoadSpec, Picture, Result, Routing
from mmrouter_cli.bench.workload import BodyWriter

MOST_IN_FLIGHT = 1024
"""Paced conversations in flight at once; the next one waits and counts as late."""
AHEAD_SECONDS = 1.0
"""A paced conversation starts this much before its first turn is due, so that its body is ready in time."""
TIMER_SECONDS = 0.05
"""Interval at which the delay of the event loop's own timers is sampled."""
SHORTEST = 1e-3
"""Duration of a run that was stopped before its first request was due."""
MOST_WORKERS = 1_000
"""Engines that are counted by name."""


async def run(
    target: Target, load: LoadSpec, conversations: Sequence[Conversation], left_out: int, console: Console
) -> Result:
    """Send all conversations and return the result; SIGINT and SIGTERM end the run early.

    Raises ``BenchError`` where the endpoint does not answer at all.
    """
    endpoint = await examine(target)
    if target.policy and endpoint.control is None:
        raise BenchError(f"a policy needs the control token: {endpoint.why or 'this is no mmrouter'}")
    if target.encoder_mode and endpoint.control is None:
        raise BenchError(f"an encoder mode needs the control token: {endpoint.why or 'this is no mmrouter'}")
    before, worked = await event_state(endpoint), await encoder_work(endpoint)
    ahead = AHEAD_SECONDS if load.paced else 0.0
    state = run_statistics.RunState(sum(len(conversation.turns) for conversation in conversations), clock() + ahead)
    started = datetime.datetime.now(datetime.UTC)
    with _stop_signals() as stop:
        interrupted = await _send_all(target, endpoint, load, conversations, state, stop, console)
    seconds = max(clock() - state.began, SHORTEST)
    after, work = await event_state(endpoint), await encoder_work(endpoint)
    answers = [answer for answer in state.answers if not answer.error]
    late_share, latest = run_statistics.lateness(state.answers)
    ratio, unknown = run_statistics.hit_ratio(answers)
    return Result(
        url=target.url,
        model=endpoint.model,
        policy=target.policy or "",
        began=started.isoformat(timespec="seconds"),
        salt=target.salt,
        load=load,
        left_out=left_out,
        tokens_per_word=round(endpoint.tokens_per_word, 4),
        seconds=seconds,
        interrupted=interrupted,
        sent=state.sent,
        answered=len(answers),
        unanswered=state.in_flight,
        failures=run_statistics.failures(state.answers),
        prompt_tokens=sum(answer.prompt or 0 for answer in answers),
        completion_tokens=sum(answer.tokens for answer in answers),
        hit_ratio=ratio,
        hit_unknown=unknown,
        first_token=run_statistics.spread([answer.first for answer in answers]),
        between_tokens=run_statistics.spread(state.gaps.values, state.gaps.seen),
        per_token=run_statistics.spread(run_statistics.per_token(answers)),
        end_to_end=run_statistics.spread([answer.total for answer in answers]),
        late_share=late_share,
        latest=latest,
        lag=(run_statistics.quantiles(state.lags.values) or [0.0] * 101)[99],
        routing=_routing(answers, before, after) if endpoint.routed else None,
        rows=run_statistics.rows(answers),
        gaps=run_statistics.quantiles(state.gaps.values),
        encoder_mode=target.encoder_mode or "",
        encoders={name: _worked(now, worked.get(name, (0, 0, 0.0)), seconds) for name, now in work.items()},
    )


def _worked(now: tuple[int, int, float], before: tuple[int, int, float], seconds: float) -> EncoderWork:
    # Several frontends may have an image at an encoder at the same time.
    return EncoderWork(now[0] - before[0], now[1] - before[1], min(1.0, max(0.0, now[2] - before[2]) / seconds))


async def _send_all(
    target: Target,
    endpoint: Endpoint,
    load: LoadSpec,
    conversations: Sequence[Conversation],
    state: run_statistics.RunState,
    stop: asyncio.Event,
    console: Console,
) -> bool:
    """Send everything; return whether ``stop`` cut it short."""
    writer = BodyWriter(target.salt, endpoint.tokens_per_word, endpoint.model, ignore_eos=load.ignore_eos)
    headers = target.headers
    if endpoint.control is not None:
        headers["x-mmrouter-control"] = endpoint.control.token
        if target.policy:
            headers["x-mmrouter-policy"] = target.policy
        if target.encoder_mode:
            headers["x-mmrouter-encoder-mode"] = target.encoder_mode
    client = Client(target.url, target.timeout, target.tls)

    async def converse(conversation: Conversation, due: float | None) -> None:
        for number, turn in enumerate(conversation.turns):
            if number:
                due = clock() + turn.pause if turn.pause else None
            # In a thread: drawing takes milliseconds, during which arriving tokens would get late timestamps.
            body = await asyncio.to_thread(writer.body, conversation, number)
            late = None
            if due is not None:
                await asyncio.sleep(max(0.0, due - clock()))
                late = max(0.0, clock() - due)
            started = clock() - state.began
            state.sent += 1
            answer = await ask(client, headers, body, started=started, late=late, gap=state.gaps.add)
            parts = [part for each in conversation.turns[: number + 1] for part in each.parts]
            answer.images = sum(isinstance(part, Picture) for part in parts)
            state.answers.append(answer)

    async def take_turns(queue: Iterator[Conversation]) -> None:
        for conversation in queue:
            await converse(conversation, None)

    async def drive() -> None:
        async with asyncio.TaskGroup() as group:
            if load.concurrency is not None:
                queue = iter(conversations)
                for _ in range(load.concurrency):
                    group.create_task(take_turns(queue))
                return
            slots = asyncio.Semaphore(MOST_IN_FLIGHT)
            for conversation in conversations:
                due = state.began + conversation.at
                await asyncio.sleep(max(0.0, due - AHEAD_SECONDS - clock()))
                await slots.acquire()
                group.create_task(converse(conversation, due)).add_done_callback(lambda _: slots.release())

    driving = asyncio.create_task(drive())
    stopped = asyncio.create_task(stop.wait())
    observers = [asyncio.create_task(_sample_lag(state.lags)), asyncio.create_task(follow(console, state, target.url))]
    try:
        await asyncio.wait((driving, stopped), return_when=asyncio.FIRST_COMPLETED)
        interrupted = not driving.done()
    finally:
        for task in (driving, stopped, *observers):
            task.cancel()
        await asyncio.gather(stopped, *observers, return_exceptions=True)
        client.close()
    with contextlib.suppress(asyncio.CancelledError):
        await driving  # raises its failure
    return interrupted


async def _sample_lag(lags: run_statistics.Sample) -> None:
    while True:
        due = clock() + TIMER_SECONDS
        await asyncio.sleep(TIMER_SECONDS)
        lags.add(max(0.0, clock() - due))


@contextlib.contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _routing(answers: Sequence[Answer], before: Events, after: Events) -> Routing:
    """Return an mmrouter's decisions, and whether engines' events reached it throughout the run."""
    decisions = Counter(answer.exactness for answer in answers if answer.exactness)
    workers = Counter(answer.worker for answer in answers if answer.worker)
    events, why, _ = before if before[0] != "on" else after
    if events == "on":
        lost = [uid for uid, epoch in before[2].items() if after[2].get(uid, epoch) != epoch]
        if lost:
            events, why = "off", f"{len(lost)} engines lost their history meanwhile"
        elif answers and not any(decisions[kind] for kind in ("exact", "bounded", "partial")):
            events, why = "off", "no decision knew what engines hold: all were affinity"
    return Routing(
        events, why, dict(decisions), run_statistics.overlap(answers), dict(workers.most_common(MOST_WORKERS))
    )
