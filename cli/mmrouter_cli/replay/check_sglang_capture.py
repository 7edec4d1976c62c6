"""Replays an SGLang capture: recomputes every published page hash, and compares image runs with the requests.

Rows describe requests in words, so a prompt is rebuilt from recorded ids if there are any, and otherwise by following
the engine's pages back to their root. Its images' sentinels must be those of the given item hash, or those of the same
image's first appearance.
"""

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmrouter_cli.replay.capture import KEY, Capture, ReplayReport, Row, Stream, comparing, load_model
from mmrouter_lib.block_keys import chain, namespace_seed
from mmrouter_lib.engines.base.events import Cleared, Stored
from mmrouter_lib.engines.sglang.events import decode_batch
from mmrouter_lib.engines.sglang.identity import (
    SENTINEL_BASE,
    legacy_sentinels,
    page_digest,
    page_hashes,
    run_ids,
    salt_root,
    sentinels,
)

_U64 = (1 << 64) - 1
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_HEX = re.compile(r"[0-9a-f]{16,64}")


class _Page(NamedTuple):
    """A published page: its whole digest, our key, its ids, and the page before it."""

    digest: bytes
    key: int
    ids: "array[int]"
    parent: int | None


def explain(capture: Capture, model_dir: Path | None) -> ReplayReport:
    """Compare a capture. Raises ``CaptureError`` for a row, or a ``model_dir``, that cannot be used.

    The model is only read: the rows hold no messages that could be rendered.
    """
    if model_dir is not None:
        load_model(model_dir)
    report = ReplayReport("sglang")
    pages = _Pages(report, legacy=_legacy(capture))
    for row in capture.rows:
        with comparing(capture, row):
            if row.kind == "radix":
                _offline(row, report)
            elif "frames_hex" in row.raw:
                report.skipped.append(f"{row.where}: a frame of the publisher alone, with made-up hashes")
            else:
                pages.compare(row)
    report.notes.append(f"{report.prompts} rows compared with the ids or images of their requests")
    if model_dir is not None:
        report.notes.append("--model is not used: this capture holds no messages")
    return report


class _Pages(Stream):
    """The pages published so far."""

    def __init__(self, report: ReplayReport, *, legacy: bool) -> None:
        super().__init__(report, decode_batch)
        self._legacy = legacy
        self._pages: dict[int, _Page] = {}
        self._hashes: dict[int, int] = {}  # key -> published hash
        self._images: dict[str, tuple[int, ...]] = {}

    def compare(self, row: Row) -> None:
        """Compare a row's frames with its request and with every formula."""
        stored: list[Stored] = []
        for frame in row.frames:
            for event in self.events(row, frame):
                if isinstance(event, Stored):
                    stored.append(event)
                    self._store(row, event)
                elif isinstance(event, Cleared):
                    self._pages.clear()
        request = row.raw.get("request")
        if isinstance(request, Mapping) and stored:
            self._compare_request(row, request, stored)

    def _store(self, row: Row, event: Stored) -> None:
        self.report.blocks += len(event.hashes)
        if event.parent is None:
            prior, key = salt_root(event.salt), namespace_seed(KEY, model="replay", salt=event.salt)
        elif (before := self._pages.get(event.parent)) is not None:
            prior, key = before.digest, before.key
        else:
            count = len(event.hashes)
            self.report.differs(row, f"the parent {event.parent:016x} of {count} pages was never published", count)
            return
        size, parent = event.block_size, event.parent
        keys = chain(event.ids, size, len(event.hashes), {}, key)
        for number, (published, key) in enumerate(zip(event.hashes, keys, strict=True)):
            ids = event.ids[number * size : (number + 1) * size]
            prior = page_digest(ids, prior)
            if int.from_bytes(prior[:8], "big") != published:
                self.report.differs(row, f"page {number}: published {published:016x}, its ids make {prior[:8].hex()}")
            elif self._hashes.setdefault(key, published) != published:
                self.report.differs(row, f"page {number}: one key, two published hashes")
            else:
                self.report.matched += 1
            self._pages[published] = _Page(prior, key, ids, parent)
            parent = published

    def _compare_request(self, row: Row, request: Mapping[str, Any], stored: Sequence[Stored]) -> None:
        prompt = self._back(stored[-1].hashes[-1])
        given = _RANGE.fullmatch(str(request.get("input_ids", "")))
        names = _images(request)
        if given is not None:
            self.report.prompts += 1
            body = (row.raw.get("reply") or {}).get("body") or {}
            want = array("Q", range(int(given[1]), int(given[2]) + 1)) + array("Q", body.get("output_ids") or [])
            if prompt != want[: len(prompt)]:
                self.report.differs(row, "template: the published ids are not those of the request")
        elif names:
            self.report.prompts += 1
            self._runs(row, request, prompt, names)

    def _runs(self, row: Row, request: Mapping[str, Any], prompt: "array[int]", names: Sequence[str]) -> None:
        # Two different images without a token between them would be one run here; templates put markers there.
        runs = list(_sentinel_runs(prompt))
        if len(runs) > len(names):
            self.report.differs(row, f"count: {len(names)} images requested, {len(runs)} published")
        for name, run in zip(names, runs, strict=False):
            width = 1 if self._legacy else 4
            values = tuple(run[:width])
            if run != run_ids(values, len(run)):
                self.report.differs(row, f"identity: the run of image {name} does not repeat its first {width} ids")
            want = _given(request, names, legacy=self._legacy) or self._images.setdefault(name, values)
            if values != want:
                self.report.differs(row, f"identity: image {name} has the sentinels {values}, {want} are expected")

    def _back(self, last: int) -> "array[int]":
        """Return all ids from the root of the chain to a page."""
        parts: list[array[int]] = []
        at: int | None = last
        while at is not None and (page := self._pages.get(at)) is not None:
            parts.append(page.ids)
            at = page.parent
        ids = array("Q")
        for part in reversed(parts):
            ids += part
        return ids


def _offline(row: Row, report: ReplayReport) -> None:
    """A row made with the engine's radix cache alone: tokens in, events out."""
    tokens = row.raw.get("tokens")
    stores = [event for event in row.raw.get("events", []) if event.get("type") == "BlockStored"]
    if not tokens or not stores:
        return
    where = f"{row.where}, page size {row.raw['page_size']}"
    blocks = sum(len(event["block_hashes"]) for event in stores)
    if row.raw.get("format") != "default":
        report.skipped.append(f"{where}: hashes in the format {row.raw.get('format')} are re-keyed ({blocks} blocks)")
        return
    report.prompts += 1
    kwargs = row.raw.get("kwargs") or {}
    made = set(page_hashes(array("Q", tokens), row.raw["page_size"], cache_salt=kwargs.get("cache_salt")))
    for event in stores:
        for published in event["block_hashes"]:
            report.blocks += 1
            if published & _U64 in made:
                report.matched += 1
            else:
                report.differences.append(f"{where}: page {published} is not made of the row's tokens")


def _images(request: Mapping[str, Any]) -> list[str]:
    """Return names that identify the row's images: equal names are equal bytes."""
    named = request.get("images")
    if isinstance(named, list):
        return [str(name) for name in named]
    if "image_data" in request:
        return [f"data {request['image_data']} {request.get('mm_hashes') or ''}"]
    return []


def _given(request: Mapping[str, Any], names: Sequence[str], *, legacy: bool) -> tuple[int, ...] | None:
    """Return the sentinels of a caller-given item hash; the engine ignores malformed or surplus ones."""
    hashes = request.get("mm_hashes")
    if "image_data" not in request or not isinstance(hashes, list) or len(hashes) != len(names):
        return None
    return sentinels(int(hashes[0], 16), legacy=legacy) if _HEX.fullmatch(hashes[0]) else None


def _sentinel_runs(ids: "array[int]") -> Iterator["array[int]"]:
    run = array("Q")
    for token in ids:
        if token >= SENTINEL_BASE:
            run.append(token)
        elif run:
            yield run
            run = array("Q")
    if run:
        yield run


def _legacy(capture: Capture) -> bool:
    for row in capture.rows:
        reply = row.raw.get("reply")
        if isinstance(reply, dict) and isinstance(reply.get("version"), str):
            return legacy_sentinels(reply["version"])
    return False
