"""Clients that send chats one after the other, and check each answer against the promises (docs/reliability.md)."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
from campaign.faults.cached_tokens import Claim
from waiting import in_threads, wait_for

from mmrouter_cli.sample_images import data_uri, picture

CLIENTS = 4
RETRIES = 5  # what docs/architecture.md recommends to clients
TOPICS = 12
PICTURES = 8
TOKENS = (3, 40, 400)


@dataclass
class Answers:
    """Outcomes so far. ``broken``: promises that an answer broke; ``texts``: the answer to each question, greedy;
    ``claims``: what answers with a request's id said of its cached tokens.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    texts: dict[tuple[str, int], str] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    slowest: float = 0.0  # seconds until a whole answer
    lock: threading.Lock = field(default_factory=threading.Lock)

    def whole(self, question: tuple[str, int], text: str, usage: Any, seconds: float, request_id: str) -> None:
        """Take a complete answer: equal questions have equal greedy answers, and usage is that of the text."""
        with self.lock:
            self.slowest = max(self.slowest, seconds)
            known = self.texts.setdefault(question, text)
            if text != known:
                self.broken.append(f"another answer to {question}: {text[:80]!r} for {known[:80]!r}")
            cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
            if cached > usage.prompt_tokens or usage.completion_tokens > question[1]:
                self.broken.append(f"usage of {question}: {usage}")
            if request_id:
                self.claims.append(Claim(request_id, usage.prompt_tokens, cached, time.time()))


class Clients:
    """``url`` is the Service's. A stream may be cut where ``may_cut`` is set: the router that carries it is killed.
    ``pictures``: every other chat begins with one of a few pictures. ``clients``: chats at a time.
    """

    def __init__(
        self, url: str, model: str, seed: int, topics: int = TOPICS, *, pictures: bool = False, clients: int = CLIENTS
    ) -> None:
        self.answers, self.may_cut = Answers(), False
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", timeout=90, max_retries=RETRIES)
        self._model, self._seed, self._topics, self._clients = model, seed, topics, clients
        self._pictures = [data_uri(picture(f"{number}")) for number in range(PICTURES if pictures else 0)]
        self._stop = threading.Event()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Send chats until the block ends, which begins when some are answered."""
        with closing(self._client), in_threads(self._run, self._clients, self._stop, 200):
            wait_for(lambda: self.answers.outcomes.total() >= 8, 60, "clients get answers")
            yield

    def ask(self, dice: random.Random) -> None:
        """Send one chat and count its outcome."""
        topic, tokens = dice.randrange(self._topics), dice.choice(TOKENS)
        turns = dice.randrange(1, 4)
        shown = dice.randrange(2 * PICTURES) if self._pictures else PICTURES
        text = f"Topic {topic} of the harbour in the light. " * 12
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in self._pictures[shown : shown + 1]]
        messages: list[Any] = [{"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}]
        for turn in range(turns):
            messages += [
                {"role": "assistant", "content": f"It is number {topic}."},
                {"role": "user", "content": f"And turn {turn}?"},
            ]
        question = f"{topic}/{turns}/{shown}" if parts else f"{topic}/{turns}", tokens
        options: Any = {"model": self._model, "messages": messages, "max_tokens": tokens, "temperature": 0}
        began, pieces = time.monotonic(), 0
        stream = dice.random() < 0.6
        try:
            create = self._client.chat.completions.with_raw_response.create
            if stream:
                answered, usage, finish = "", None, None
                raw: Any = create(**options, stream=True, stream_options={"include_usage": True})
                for chunk in raw.parse():
                    pieces += 1
                    usage = chunk.usage or usage
                    for choice in chunk.choices:
                        answered += choice.delta.content or ""
                        finish = choice.finish_reason or finish
                if usage is None or finish is None:
                    raise ConnectionError("the stream ended without a finish reason or usage")
            else:
                raw = create(**options)
                answer = raw.parse()
                answered, usage = answer.choices[0].message.content or "", answer.usage
        except Exception as error:  # the client's transport has many ways to say that an answer broke off
            self._failed(error, pieces, question)
        else:
            request_id = raw.headers.get("x-mmrouter-request-id", "")
            self.answers.whole(question, answered, usage, time.monotonic() - began, request_id)
            self.answers.outcomes["streams" if stream else "answers"] += 1

    def _failed(self, error: Exception, pieces: int, question: tuple[str, int]) -> None:
        what = f"{type(error).__name__}: {error}"[:300]
        with self.answers.lock:
            if not pieces:
                self.answers.outcomes["not answered"] += 1
                self.answers.broken.append(f"{question} was not answered: {what}")
            elif isinstance(error, openai.APIError) and not isinstance(error, openai.APIConnectionError):
                self.answers.outcomes["streams ended by an error event"] += 1
                if not self.may_cut:
                    self.answers.broken.append(f"the stream of {question} ended with an error: {what}")
            else:
                self.answers.outcomes["streams cut"] += 1
                if not self.may_cut:
                    self.answers.broken.append(f"the stream of {question} was cut: {what}")

    def _run(self, number: int) -> None:
        dice = random.Random(f"{self._seed}/{number}")
        while not self._stop.is_set():
            self.ask(dice)
            time.sleep(0.02)  # leaves CPU to the processes under test
