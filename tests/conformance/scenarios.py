"""The ten scenarios by which image routing is judged, as requests with what an engine's cache must answer.

``tests/scenarios.py`` runs them through a deployment and reads the router's decisions. These compare an engine with the
library's prediction and need no router.

Each stands under a system prompt of its own, so its first request finds nothing but text of its own in the cache.
Images come by ``http:`` from an origin on loopback; what the router's own fetcher made of them is what the engine gets.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from artefacts import Record
from conformance.engine_process import Engine
from conformance.prediction import Exchange, Predicted, Predictor, Report, compare, image_places, repeats
from conformance.report import Cells
from conformance.workload import Case, case, data_uri, picture, said, user
from scenarios import served

from mmrouter_lib.api import Media as MediaSettings
from mmrouter_lib.engines.base.events import Batch
from mmrouter_router.media.resolve import MediaResolver
from mmrouter_router.telemetry.metrics import Metrics

Hit = Literal["whole", "before image", "common"]
"""What a request finds of the ones before it: all of itself, the blocks before its first image, or what it begins with
in common with the request before it. A scenario's first request is never asked about."""

IMAGES = {f"{name}.png": picture(320, 240, seed=seed) for name, seed in (("a", 71), ("b", 72), ("c", 73))}


@dataclass(frozen=True)
class Scenario:
    """``cases`` are sent in order; ``hits`` says what each after the first one finds."""

    name: str
    cases: tuple[Case, ...]
    hits: tuple[Hit, ...]


def scenarios(origin: str) -> list[Scenario]:
    a, b, c = (data_uri(data) for data in IMAGES.values())
    url = f"{origin}/a.png"
    signed = f"{url}?X-Amz-Signature=5f1c&X-Amz-Expires=600"
    return [
        scenario("text only", [(), ()], ["whole"]),
        scenario("same image", [(a,), (a,)], ["whole"]),
        scenario("different image", [(a,), (b,)], ["before image"]),
        scenario("several images", [(a, b, c), (a, b, c)], ["whole"]),
        scenario("http", [(url,), (url,)], ["whole"]),
        scenario("data", [(b,), (b,)], ["whole"]),
        scenario("staircase 1..k", [(c,), (c, a), (c, a, b)], ["common", "common"]),
        scenario("swapped", [(a, b), (b, a)], ["before image"]),
        scenario("http == data", [(url,), (a,)], ["whole"]),
        scenario("signed URL == plain URL", [(signed,), (url,)], ["whole"]),
    ]


def scenario(name: str, images: Sequence[Sequence[str]], hits: Sequence[Hit]) -> Scenario:
    rule = said(
        "system", f"This is about {name}. " + "Answer in one sentence, and say nothing of what is not asked. " * 3
    )
    made = []
    for number, urls in enumerate(images):
        # One turn for each image: a longer conversation then goes on where a shorter one ended.
        turns = [user({"type": "image_url", "image_url": {"url": one}}, "What do you see here?") for one in urls]
        between = [said("assistant", "A picture of several rectangles.")] * len(turns)
        talk = [turn for pair in zip(turns, between, strict=True) for turn in pair][:-1] or [user("What is a picture?")]
        made.append(case(f"{name} {number}", rule, *talk, max_tokens=1))
    return Scenario(name, tuple(made), tuple(hits))


def fetched(found: Sequence[Scenario]) -> list[Scenario]:
    """Return the scenarios with every URL replaced by the bytes that the router's own resolver has for it."""

    async def all_of_them() -> list[Scenario]:
        settings = MediaSettings(fetch="public", allowed_cidrs=["127.0.0.0/8"])
        resolver = MediaResolver(settings, metrics=Metrics())
        try:
            return [replace(one, cases=tuple([await inlined(resolver, case) for case in one.cases])) for one in found]
        finally:
            await resolver.close()

    return asyncio.run(all_of_them())


async def inlined(resolver: MediaResolver, one: Case) -> Case:
    messages: list[dict[str, Any]] = [dict(message) for message in one.body["messages"]]
    for at, number, url in image_places(one):
        media = await resolver.resolve(url, param=f"messages[{at}].content[{number}]")
        parts = list(messages[at]["content"])
        parts[number] = {"type": "image_url", "image_url": {"url": data_uri(media.data)}}
        messages[at]["content"] = parts
    return replace(one, body=one.body | {"messages": messages})


def faults(one: Scenario, predictor: Predictor, cached: Mapping[str, int]) -> list[str]:
    """Say where an engine's cache answered otherwise. ``cached``: case name -> tokens that the engine took from it."""
    size = predictor.block_size
    found: list[str] = []
    before: Predicted | None = None
    for asked, hit in zip(one.cases, ("first", *one.hits), strict=True):
        predicted = predictor.predict(asked)
        want = None
        if hit == "whole":
            want = (len(predicted.ids) - 1) // size
        elif hit == "before image":
            want = predicted.spans[0].offset // size
        elif hit == "common" and before is not None:
            want = shared(predictor.keys(before), predictor.keys(predicted))
        if want is not None and (want == 0 or cached[asked.name] != want * size):
            found.append(f"{asked.name}: {want} blocks of hit expected, {cached[asked.name] / size:g} found")
        before = predicted
    return found


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@contextmanager
def served_images() -> Iterator[str]:
    with TemporaryDirectory() as folder, served(Path(folder)) as web:
        for name, data in IMAGES.items():
            web.put(name, data)
        yield web.url


@dataclass(frozen=True)
class Run:
    """A family's recorded run: nothing in it depends on the engine being alive. ``row``: family and provider of its
    cell, where they are not those of the predictor and of the engine.
    """

    kind: str
    predictor: Predictor
    exchanges: Sequence[Exchange]
    scenarios: Sequence[Scenario]
    batches: Sequence[Batch]
    live: Sequence[tuple[int, bytes]]
    replayed: Sequence[tuple[int, bytes]]
    row: tuple[str, str] | None = None

    def compared(self, **changes: Any) -> Report:
        """Compare what was published with a prediction; ``changes``: deliberate breaks of the predictor."""
        return compare(self.exchanges, self.batches, replace(self.predictor, **changes))

    @property
    def _cell(self) -> tuple[str, str]:
        return self.row or (self.predictor.family.name, "")

    def assert_predicted(self, record: Record, cells: Cells, least: int) -> Report:
        """Every block is the predicted one, of at least so many."""
        report, (name, provider) = self.compared(), self._cell
        record(f"prediction, {self.kind} {name}", report.line)
        sent = ((one.case, one.cached_tokens, len(one.prompt_ids)) for one in self.exchanges)
        cells.compared(self.kind, name, report, repeats(sent), provider=provider)
        print(f"\n{name}: {report.line}", *report.mismatches[:20], sep="\n")
        assert report.mismatches == []
        assert report.matched == report.blocks > least
        return report

    def assert_scenarios(self, cells: Cells) -> None:
        """The ten scenarios hit what they must, and nothing else."""
        cached = {exchange.case.name: exchange.cached_tokens for exchange in self.exchanges}
        results = {one.name: faults(one, self.predictor, cached) for one in self.scenarios}
        name, provider = self._cell
        cells.scenarios(self.kind, name, results, provider=provider)
        assert len(results) == 10
        assert {name: found for name, found in results.items() if found} == {}


def recorded(
    kind: str, served: Engine, predictor: Predictor, exchanges: Sequence[Exchange], ten: Sequence[Scenario]
) -> Run:
    """Return the run once everything was published."""
    listener = served.listener
    listener.wait_for_prompt(exchanges[-1].prompt_ids)
    return Run(kind, predictor, exchanges, ten, listener.batches(), list(listener.frames), listener.replayed())


def figures(served: Engine, began: float) -> dict[str, float]:
    return {
        "start_s": round(served.start_s, 1),
        "memory_gb": round(served.memory_bytes() / 1e9, 1),
        "workload_s": round(time.monotonic() - began, 1),
    }
