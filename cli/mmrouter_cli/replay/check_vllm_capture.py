"""Replays a vLLM capture: compares every stored block with the blocks that the requests so far predict."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from mmrouter_cli.replay.capture import KEY, Capture, ReplayReport, Row, Stream, comparing
from mmrouter_cli.replay.vllm_requests import UNKNOWN, NotRebuiltError, Prompt, Requests
from mmrouter_lib.block_keys import block_keys, chain, namespace_seed
from mmrouter_lib.engines.base.events import Cleared, Ragged, Removed, Stored
from mmrouter_lib.engines.vllm.events import decode_batch


def explain(capture: Capture, model_dir: Path | None) -> ReplayReport:
    """Compare a capture. Raises ``CaptureError`` for a model folder or a row that cannot be used."""
    report = ReplayReport("vllm")
    requests = Requests(capture, model_dir)
    blocks = _Blocks(report)
    for row in capture.rows:
        with comparing(capture, row):
            if row.kind == "replay":
                blocks.replayed(row)
                continue
            try:
                prompt = requests.prompt(row)
            except NotRebuiltError as error:
                blocks.skip(row, str(error))
                continue
            if prompt is not None and prompt.returned is not None:
                report.rendered += 1
                if (difference := _ids_differ(prompt)) is not None:
                    report.differs(row, difference)
            blocks.compare(row, prompt)
    if model_dir is None:
        report.notes.append(f"{report.prompts} prompts as the engine returned them; --model renders them too")
    elif not report.rendered:
        report.notes.append("--model is not used: this capture holds no messages with their images and answers")
    else:
        by = f"{report.rendered} of {report.prompts} prompts rendered by the library"
        report.notes.append(f"{by}, the others as the engine returned them")
    return report


class _Blocks(Stream):
    """The blocks published so far, in the router's keys."""

    def __init__(self, report: ReplayReport) -> None:
        super().__init__(report, decode_batch)
        self._keys: dict[int, int] = {}  # engine hash -> key
        self._hashes: dict[int, int] = {}  # key -> engine hash
        self._predicted: dict[int, None] = {}
        self._held: Counter[int] = Counter()
        from mmrouter_sidecar.blocks.sliding_windows import WindowBlocks

        self._windows = WindowBlocks()
        self._windowed = False
        self._size = 0

    def skip(self, row: Row, why: str) -> None:
        """Apply a row's frames without comparison, so that later blocks find their parents."""
        blocks = 0
        for frame in row.frames:
            blocks += _stored_blocks(frame.payload)
            for event in self.events(row, frame):
                if isinstance(event, Stored | Ragged):
                    self._chain(event)
        if blocks or row.frames or "capture" in why:
            self.report.skipped.append(f"{row.where}: {why}" + (f" ({blocks} blocks)" if blocks else ""))

    def compare(self, row: Row, prompt: Prompt | None) -> None:
        """Compare a row's frames with all requests so far."""
        batches = [self.events(row, frame) for frame in row.frames]
        stored = [event for batch in batches for event in batch if isinstance(event, Stored)]
        own: array[int] = array("Q")
        announced = [event for batch in batches for event in batch if isinstance(event, Stored | Ragged)]
        size = self._size = announced[0].block_size if announced else self._size
        if prompt is not None:
            self.report.prompts += 1
            prompt = self._named_by_events(row, prompt, stored)
            if size:
                own = block_keys(prompt.ids, size, prompt.spans, _seed(prompt.lora, prompt.salt))
                self._predicted.update(dict.fromkeys(own))
        failed = False
        for frame, batch in zip(row.frames, batches, strict=True):
            published = _stored_blocks(frame.payload)
            matched = sum(self._apply(row, event, prompt) for event in batch)
            self.report.blocks += published
            self.report.matched += matched
            more = published - matched
            if more > 0 and not failed:
                failed = True
                self.report.differs(row, self._difference(prompt, stored, size))
            self.report.differs(row, "one more block that nothing predicts", more - 1)
        if row.frames and prompt is not None and size and self._complete and not self._windowed and not failed:
            whole = own[: prompt.prompt_tokens // size]
            for number in (number for number, key in enumerate(whole) if not self._held[key]):
                self.report.differs(row, f"block {number} of {len(whole)} predicted, never published")

    def replayed(self, row: Row) -> None:
        """Compare replayed batches with those that were sent live."""
        for part in row.raw.get("parts", []):
            if len(part) == 4 and part[3]:
                live = self.payloads.get(seq := int(part[2], 16))
                if live is not None and live.hex() != part[3]:
                    self.report.differs(row, f"batch {seq} is not the one that was sent live")

    @property
    def _complete(self) -> bool:
        """Whether the capture has the stream from its first batch."""
        return next(iter(self.payloads), None) == 0

    def _apply(self, row: Row, event: Any, prompt: Prompt | None) -> int:
        """Apply an event; return how many of its blocks are predicted."""
        match event:
            case Stored() | Ragged():
                self._windowed |= event.window is not None
                keys = self._chain(event)
                if keys is None:
                    return 0
                self._held.update(keys)
                return sum(key in self._predicted for key in keys)
            case Removed():
                for engine_hash in event.hashes:
                    key = self._keys.get(engine_hash)
                    if key is not None:
                        self._held[key] = max(0, self._held[key] - 1)
                    elif self._complete:
                        self.report.differs(row, f"removed block {engine_hash}, never published")
            case Cleared():
                self._held.clear()
        return 0

    def _chain(self, event: Stored | Ragged) -> "array[int] | None":
        """Return the keys of an event's blocks, as the sidecar computes them; ``None`` for an unknown parent."""
        if isinstance(event, Ragged):
            placed = self._windows.place(event, _seed)
            hashes, keys = placed.hashes, placed.keys
        else:
            if event.parent is None:
                parent: int | None = _seed(event.lora, event.salt)
            else:
                parent = self._keys.get(event.parent, self._windows.key(event.parent))
            if parent is None:
                return None
            hashes = event.hashes
            keys = chain(event.ids, event.block_size, len(hashes), event.extras, parent)
            if event.window is not None:
                self._windows.follow(event, keys)
        for engine_hash, key in zip(hashes, keys, strict=True):
            if self._keys.setdefault(engine_hash, key) != key:
                self.report.differences.append(f"engine block {engine_hash:016x} stands for two of our keys")
            if self._hashes.setdefault(key, engine_hash) != engine_hash:
                self.report.differences.append(f"key {key:016x} stands for two of the engine's blocks")
        return keys

    def _named_by_events(self, row: Row, prompt: Prompt, stored: Sequence[Stored]) -> Prompt:
        """Take the identity of an image without a file from the events, and note it."""
        if all(span.identity != UNKNOWN for span in prompt.spans):
            return prompt
        seen = {identity for event in stored for _, identity, _ in event.spans}
        name = seen.pop() if len(prompt.spans) == 1 and len(seen) == 1 else bytes(32)
        self.report.notes.append(f"{row.where}: the image's file is missing; its name is taken from the events")
        spans = [replace(span, identity=span.identity or name) for span in prompt.spans]
        return replace(prompt, spans=tuple(spans))

    def _difference(self, prompt: Prompt | None, stored: Sequence[Stored], size: int) -> str:
        from mmrouter_router.explain.differences import Prediction, first_difference

        for event in stored:
            parent = event.parent
            if parent is not None and parent not in self._keys and self._windows.key(parent) is None:
                return f"the parent {event.parent:016x} of stored blocks was never published"
        if prompt is None:
            return "blocks were published without a request for them"
        if not stored:
            return "blocks were published that cannot be indexed"
        if size < 1:
            return f"the engine publishes blocks of {size} tokens"
        predicted = Prediction(prompt.ids, prompt.spans, size, prompt.salt, prompt.placeholder_id)
        first = first_difference(predicted, stored)
        if first is not None:
            return f"{first.cause}: {first.message}"
        lora = next((event.lora for event in stored if event.lora != prompt.lora), prompt.lora)
        if lora != prompt.lora:
            return f"salt: predicted LoRA {prompt.lora!r}, the engine used {lora!r}"
        return "blocks were published whose place in the prompt is unknown"


def _ids_differ(prompt: Prompt) -> str | None:
    returned = prompt.returned
    assert returned is not None
    predicted = prompt.ids[: prompt.prompt_tokens]
    if predicted == returned:
        return None
    at = next((n for n, pair in enumerate(zip(predicted, returned, strict=False)) if pair[0] != pair[1]), None)
    where, cause = "", "template"
    if at is not None:
        where = f", the first difference at token {at}: {predicted[at]} predicted, {returned[at]} used"
        cause = "count" if prompt.placeholder_id in (predicted[at], returned[at]) else cause
    return f"{cause}: {len(predicted)} prompt tokens predicted, {len(returned)} used{where}"


def _seed(lora: str | None, salt: str | None) -> int:
    return namespace_seed(KEY, model="replay", lora=lora, salt=salt)


def _stored_blocks(payload: bytes) -> int:
    """Return the number of a payload's stored blocks without the library's decoder, so that omissions are noticed."""
    try:
        events = msgspec.msgpack.decode(payload)[1]
    except (msgspec.DecodeError, IndexError, TypeError):
        return 0
    maps = [
        event if isinstance(event, dict) else {"type": event[0], "block_hashes": event[1]}
        for event in events
        if isinstance(event, dict) or (isinstance(event, list) and len(event) > 1)
    ]
    return sum(len(event["block_hashes"]) for event in maps if event.get("type") == "BlockStored")
