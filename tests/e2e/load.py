"""Traffic under load: a few clients that talk about pictures until the block ends, and what became of every request.

Each client is the official one. Half of them keep their connections, half make one for each request; half stream. A
conversation opens with one of a few pictures and has three turns, so almost every prompt begins with one that came
before: the hit ratio of a quiet deployment is high, and one that lost its caches shows it. One conversation in four,
and every long one, begins with nothing that came before, so it goes to the engine with the least load: to one that is
new, too. Clients wait for an answer and then for a moment, so a slow deployment gets fewer requests and not more.
"""

import hashlib
import itertools
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import openai
from e2e.deploying import Deployed
from e2e.endpoints import at_service
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture

TURNS = 3
PICTURES = 4
NEW = 4
"""One conversation in so many is like none before."""
ANSWER_TOKENS = 16
MEASURED = 40
"""Requests of which a hit ratio is taken."""
ROUNDS = 4
"""In so many times as many requests it has to be what it was."""
TIMEOUT_SECONDS = 60.0
JOIN_SECONDS = 90.0
TEXT = "The harbour lies still in the early light and the boats wait for the tide to turn. " * 3
QUESTIONS = ("What is to be seen here?", "Which colour is the strongest, and where is it?", "And the weakest of all?")


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of one request. Times are seconds since 1970, as the API server's are. The router's headers say
    ``worker`` (the pod's name), ``exactness``, ``overlap`` and ``blocks`` of the prompt; they are empty and 0 where no
    answer came. ``error``: empty for an answer that came whole.
    """

    client: int
    streams: bool
    keeps: bool
    started: float
    first: float | None = None
    """When the answer's first token came; of one that is not streamed, when it came whole."""
    ended: float = 0.0
    request_id: str = ""
    worker: str = ""
    exactness: str = ""
    overlap: int = 0
    blocks: int = 0
    status: int | None = None
    error: str = ""
    retries: int = 0
    """How often the client tried again until an answer began."""

    @property
    def streamed(self) -> bool:
        """Whether the client had a part of the answer already when it ended."""
        return self.streams and self.first is not None

    def __str__(self) -> str:
        how = ("streamed" if self.streams else "plain") + (", kept connection" if self.keeps else ", new connection")
        moment = time.strftime("%H:%M:%S", time.gmtime(self.started)) + f"{self.started % 1:.3f}"[1:]
        what = f"after {self.ended - self.started:.2f} s: {self.status or ''} {self.error or 'ok'}"
        began = ", had begun" if self.streamed and self.error else ""
        return f"{moment} client {self.client} ({how}{began}) {self.request_id} at {self.worker or '?'} {what}"


@dataclass
class Traffic:
    """The record of a load. It may be read at any time, also while the load goes on."""

    sent: list[Sent] = field(default_factory=list)
    streams: dict[int, Sent] = field(default_factory=dict)
    """Client -> the answer that streams to it now."""

    def begun(self, sent: Sent) -> None:
        self.streams[sent.client] = sent

    def ended(self, sent: Sent) -> None:
        self.streams.pop(sent.client, None)
        self.sent.append(sent)

    @property
    def failed(self) -> list[Sent]:
        return [each for each in list(self.sent) if each.error]

    @property
    def failed_before_streaming(self) -> list[Sent]:
        """Those of which the client had nothing yet."""
        return [each for each in self.failed if not each.streamed]

    @property
    def inexact(self) -> list[Sent]:
        return [each for each in list(self.sent) if not each.error and each.exactness != "exact"]

    def assert_exact(self) -> None:
        """Fail if more than one in ten answered requests was not placed exactly. A busy machine delays a heartbeat
        beyond the router's limit of 2 s now and then, and the router then correctly places by affinity until the next
        heartbeat.
        """
        inexact = self.inexact
        assert 10 * len(inexact) <= len(self.sent), (len(inexact), len(self.sent), inexact[:5])

    def between(self, since: float = 0.0, until: float = float("inf")) -> list[Sent]:
        """Return the answered requests that started at ``since`` or later, and before ``until``."""
        return [each for each in list(self.sent) if not each.error and since <= each.started < until]

    def hit_ratio(self, since: float = 0.0, until: float = float("inf")) -> float:
        return hit_ratio(self.between(since, until))

    def recovered(self, wanted: float) -> float:
        """Return the hit ratio of ``MEASURED`` more requests: in one of some rounds, as soon as it is as wanted."""
        found = 0.0
        for _ in range(ROUNDS):
            if (found := self.hit_ratio(self.go_on(MEASURED))) > wanted:
                break
        return found

    def workers(self, since: float = 0.0, until: float = float("inf")) -> set[str]:
        return {each.worker for each in self.between(since, until)}

    def go_on(self, count: int = 20, seconds: float = 60.0) -> float:
        """Wait until ``count`` more requests were begun and answered; return when that began. They are
        ``between(result)`` then, so a state is measured by requests and not by time. Raises ``TimeoutError``, which
        tells what failed.
        """
        since = time.time()

        def answered() -> int:
            return len(self.between(since))

        wait_for(lambda: answered() >= count, seconds, f"{count} answers", known=lambda: f"{answered()}: {self}")
        return since

    def __str__(self) -> str:
        lines = [f"{len(self.sent)} requests, {len(self.failed)} failed, hit ratio {self.hit_ratio():.3f}"]
        return "\n".join([*lines, *map(str, self.failed[:20])])


def hit_ratio(among: Iterable[Sent]) -> float:
    rows = [(each.overlap, each.blocks) for each in among]
    return sum(overlap for overlap, _ in rows) / max(1, sum(blocks for _, blocks in rows))


def router(sent: Sent, pods: Mapping[str, dict[str, Any]]) -> str:
    """Return the name of the frontend among ``pods`` (name -> pod) that took a request, empty for another one."""
    ids = {hashlib.sha256(pod["metadata"]["uid"].encode()).hexdigest()[:8]: name for name, pod in pods.items()}
    return ids.get(sent.request_id.partition("-")[0], "")


@contextmanager
def load(
    deployed: Deployed,
    *,
    clients: int = 4,
    pause: float = 0.2,
    max_retries: int = 0,
    long_tokens: int = 0,
    long_clients: int = 1,
    policy: str = "",
) -> Iterator[Traffic]:
    """Send requests to the Service of a deployment until the block ends; what has been sent by then is waited for.
    ``pause``: seconds that each client waits after an answer. ``max_retries``: of the official client. ``long_tokens``:
    the length of the answers of ``long_clients`` more that stream all the time; 0: there are none. ``policy``: by which
    requests are placed, instead of the deployment's.
    """
    pictures = [data_uri(picture(secrets.token_hex(8))) for _ in range(PICTURES)]
    traffic, stop, token = Traffic(), threading.Event(), deployed.token()
    chosen = {"x-mmrouter-policy": policy} if policy else {}

    def talk(number: int, url: str) -> None:
        keeps, long = number % 2 == 0, number >= clients
        with openai.OpenAI(
            base_url=f"{url}/v1",
            api_key="any",
            default_headers={"x-mmrouter-control": token, **chosen} | ({} if keeps else {"connection": "close"}),
            timeout=TIMEOUT_SECONDS,
            max_retries=max_retries,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client:
            converse(client, number, keeps, long)

    def converse(client: openai.OpenAI, number: int, keeps: bool, long: bool) -> None:
        random_ = random.Random(number)
        for conversation in itertools.count():
            new = long or conversation % NEW == number % NEW
            opening = f"{secrets.token_hex(8)} sees well." if new else "You see well."
            messages: list[dict[str, Any]] = [{"role": "system", "content": f"{opening} {TEXT}"}]
            url = data_uri(picture(secrets.token_hex(8))) if new else random_.choice(pictures)
            shown = {"type": "image_url", "image_url": {"url": url}}
            for turn in range(TURNS):
                if stop.wait(pause):
                    return
                question = {"type": "text", "text": f"{QUESTIONS[turn]} ({number}, {conversation})"}
                messages.append({"role": "user", "content": [shown, question] if turn == 0 else [question]})
                streams = long or (number // 2 + turn) % 2 == 0
                length = {"max_tokens": long_tokens if long else ANSWER_TOKENS, "extra_body": {"ignore_eos": True}}
                begun = Sent(number, streams, keeps, time.time())
                sent, answer = _send(client, begun, deployed.name, messages, length, traffic.begun)
                traffic.ended(sent)
                if sent.error:
                    break
                messages.append({"role": "assistant", "content": answer})

    numbers = range(clients + (long_clients if long_tokens else 0))
    with at_service(deployed, outlives=True) as url:
        threads = [threading.Thread(target=talk, args=(number, url), name=f"client {number}") for number in numbers]
        for thread in threads:
            thread.start()
        try:
            yield traffic
        finally:
            stop.set()
            for thread in threads:
                thread.join(JOIN_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a request has no end"


def _send(
    client: openai.OpenAI, sent: Sent, model: str, messages: Any, options: dict[str, Any], begun: Callable[[Sent], None]
) -> tuple[Sent, str]:
    """Return a request's result and the answer's text. ``begun`` is called when the answer begins to stream."""
    seen: dict[str, Any] = {}
    pieces: list[str] = []
    try:
        raw = client.chat.completions.with_raw_response.create(
            model=model,
            messages=messages,
            temperature=0,
            stream=sent.streams,
            # In another cluster the API server would take it for a credential of its own.
            extra_headers={"Authorization": openai.Omit()},
            **options,
        )
        seen |= _placed(raw.headers) | {"retries": raw.retries_taken}
        if sent.streams:
            begun(replace(sent, **seen))
        answer: Any = raw.parse()
        reason = None
        for chunk in answer if sent.streams else [answer]:
            for choice in chunk.choices:
                seen.setdefault("first", time.time())
                pieces.append((choice.delta if sent.streams else choice.message).content or "")
                reason = choice.finish_reason or reason
        if reason is None:  # the client takes a stream that was cut off between two chunks for a whole one
            seen["error"] = "ended without a finish_reason"
    except Exception as error:  # whatever it is, the client has no whole answer
        seen["error"] = " <- ".join(repr(each) for each in _chain(error))
        if isinstance(error, openai.APIStatusError):
            seen["status"] = error.status_code
            seen.setdefault("request_id", error.response.headers.get("x-mmrouter-request-id", ""))
    return replace(sent, **seen, ended=time.time()), "".join(pieces)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _placed(headers: Mapping[str, str]) -> dict[str, Any]:
    return {
        "status": 200,
        "request_id": headers["x-mmrouter-request-id"],
        "worker": headers["x-mmrouter-worker"],
        "exactness": headers["x-mmrouter-exactness"],
        "overlap": int(headers["x-mmrouter-overlap-blocks"]),
        "blocks": int(headers["x-mmrouter-prompt-blocks"]),
    }
