"""`mmrouter verify`: checks end to end that routing is exact right now (docs/exactness.md). Fails closed.

Each round uses new text: a request three times, then the same text with another image. The repeats must be predicted
as complete hits, go to the first one's engine, and agree with the engine's own ``cached_tokens``; the other image must
not hit past the text before it. Two images swapped must differ from the first image on, and the same two in the same
order must hit completely, since a miss alone may come from a cache that never held them.

Where the deployment predicts no images (a text-only model), other texts take the images' place.

By default (strict) every request must be `exact`. Otherwise a `partial` one must hit at least the blocks before its
first image (more where the identity of that image is known and a later one's is not), and never more than the engine
had. `affinity` always fails.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

import httpx

from mmrouter_cli.chat_probe import ChatProbe, ProbeError, expected_cached, reachable_blocks
from mmrouter_cli.sample_images import data_uri, picture
from mmrouter_cli.status.control_api import ControlEndpoint

ROUNDS = 3
SETTLE_SECONDS = 5.0
"""Longest wait for events, which take milliseconds; missing ones show in the repeats."""
NOT_PROBED = "not_probed"
"""Cause of a pod that routers cannot prove by themselves; the requests of this check pass through it."""


class Check(NamedTuple):
    """One property; ``message`` describes the observation, or the first difference."""

    name: str
    passed: bool
    message: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What one request showed. ``cached`` is the engine's own count, ``None`` if not reported."""

    request_id: str
    worker: str
    exactness: str
    overlap: int
    blocks: int
    block_size: int
    prompt_tokens: int
    engine_tokens: int
    cached: int | None
    answers: str = ""
    """The engine that answered, where ``worker`` computed the prompt for it."""
    before: int | None = None
    """Complete blocks before the first image; ``None`` where not needed."""
    recomputed: int = 0
    """Held blocks that the engine computes anew for its drafter."""
    tier: int | None = None
    """Blocks after the overlap that lower tiers hold; ``None`` for an engine without such tiers."""

    @property
    def promised(self) -> int | None:
        """Blocks that a repeat must hit: all that it can for `exact`, those before the first image for `partial`, else
        ``None``.
        """
        if self.exactness == "exact":
            return reachable_blocks(self.blocks, self.block_size, self.prompt_tokens) - self.recomputed
        return self.before if self.exactness == "partial" else None

    @property
    def whole_hit(self) -> bool:
        """Whether the overlap is at least what was promised. The last block is held but never served, and a `partial`
        prediction may reach beyond an image that is known, up to the first unknown one.
        """
        return 0 < (self.promised or 0) <= self.overlap + (self.tier or 0) <= self.blocks


class Verifier:
    """Sends the requests and checks the answers."""

    def __init__(
        self, endpoint: ControlEndpoint, *, api_key: str | None, client: httpx.Client, strict: bool = True
    ) -> None:
        self._probe, self._strict = ChatProbe(endpoint, client, api_key=api_key), strict
        self._model = ""
        self._with_images = True

    def run(self, rounds: int = ROUNDS) -> list[Check]:
        """Return every check, in order. Failures of the deployment are failed checks, never exceptions."""
        try:
            self._model = self._probe.served_model()
            checks = [self._verified()]
            for number in range(1, rounds + 1):
                checks += self._round(number)
            return checks
        except (ProbeError, httpx.HTTPError) as error:
            return [Check("reachable", False, str(error) or type(error).__name__)]

    def _verified(self) -> Check:
        states = self._probe.states()
        self._with_images = all(state.get("predicts_images", True) for state in states)
        workers = [worker for state in states for worker in state["workers"] if worker["cause"] != NOT_PROBED]
        bad = [worker for worker in workers if worker["standing"] != "verified"]
        if not workers:
            return Check("workers verified", False, "no worker is known")
        if bad:
            first = bad[0]
            what = f"{first['name']} is {first['standing']} (verified: {first['verified']}"
            return Check("workers verified", False, f"{what}; {first['cause']} {first['message']})")
        return Check("workers verified", True, f"{len(workers)} views on workers, every one proved")

    def _round(self, number: int) -> list[Check]:
        nonce = secrets.token_hex(8)
        first_image, other_image, second_image = (picture(nonce + name) for name in "abc")
        name, what = f"round {number}", "image" if self._with_images else "text"
        first = self._send(nonce, [first_image])
        checks = [self._exact(f"{name}: exact", first)]
        if not checks[0].passed:
            return checks
        self._probe.settle(self._body(nonce, [first_image]), first.promised or 0, SETTLE_SECONDS)
        repeats = [self._send(nonce, [first_image]) for _ in range(2)]
        checks.append(check_repeats(f"{name}: repeats are whole hits", first, repeats, strict=self._strict))
        checks.append(check_cached_tokens(f"{name}: cached_tokens agree", repeats))
        checks.append(self._misses(f"{name}: another {what} misses", nonce, [other_image], first))
        # The second one is new: where a template puts images before the text, no prompt has begun with it.
        both = [first_image, second_image]
        pair = self._send(nonce + " pair", both)
        self._probe.settle(self._body(nonce + " pair", both), pair.promised or 0, SETTLE_SECONDS)
        checks.append(self._misses(f"{name}: swapped {what}s part", nonce + " pair", both[::-1], pair))
        again = [self._send(nonce + " pair", both)]
        checks.append(check_repeats(f"{name}: the same order is a whole hit", pair, again, strict=self._strict))
        checks.append(check_cached_tokens(f"{name}: cached_tokens of the same order", again))
        return checks

    def _exact(self, name: str, result: Observation) -> Check:
        """Check the exactness, and that the engine counts as many prompt tokens as predicted."""
        if (refused := _not_allowed(result, strict=self._strict)) is not None:
            return Check(name, False, refused)
        if result.prompt_tokens != result.engine_tokens:
            difference = f"predicted {result.prompt_tokens} prompt tokens, the engine counted {result.engine_tokens}"
            return Check(name, False, f"{result.request_id}: {difference}")
        if not result.promised:
            return Check(name, False, f"{result.request_id} has no complete block: nothing is proved")
        allowed = "" if result.exactness == "exact" else f"; only {result.exactness}, which --no-strict allows"
        return Check(name, True, f"{result.prompt_tokens} tokens as the engine counts{allowed}")

    def _misses(self, name: str, text: str, images: Sequence[bytes], like: Observation) -> Check:
        """Check that another image under the same text hits nothing from the first image on, predicted or real."""
        result = self._send(text, images)
        if (refused := _not_allowed(result, strict=self._strict)) is not None:
            return Check(name, False, refused)
        if not self._with_images:
            return check_parts(name, result, like)
        before = result.before
        if before is None:
            before = self._blocks_before(result.request_id, result.block_size)
        held = result.overlap + (result.tier or 0)
        if held > before:
            difference = f"predicted {held} held blocks, only {before} stand before the first image"
            return Check(name, False, f"{result.request_id}: {difference}: a different image is treated as equal")
        if result.cached is None:
            return Check(name, False, f"{result.request_id}: cached_tokens is absent")
        if result.cached > before * result.block_size:
            equal = before * result.block_size
            difference = f"the engine served {result.cached} tokens from its cache, at most {equal} are equal"
            return Check(name, False, f"{result.request_id}: {difference}")
        return Check(name, True, f"{result.overlap} of {like.blocks} blocks, {before} before the first image")

    def _blocks_before(self, request_id: str, block_size: int) -> int:
        """Return the complete blocks before a request's first image, according to its decision."""
        images = self._probe.decision(request_id)["images"]
        if not images:
            raise ProbeError(f"{request_id}: the decision names no image")
        return int(images[0]["offset"]) // block_size

    def _send(self, text: str, images: Sequence[bytes]) -> Observation:
        answer = self._probe.chat(self._body(text, images))
        headers, usage = answer.headers, answer.json().get("usage") or {}
        if "x-mmrouter-exactness" not in headers:
            raise ProbeError("the endpoint does not show its decisions: the control token is wrong")
        request_id, exactness = headers["x-mmrouter-request-id"], headers["x-mmrouter-exactness"]
        block_size = int(headers["x-mmrouter-block-size"])
        return Observation(
            request_id=request_id,
            worker=headers["x-mmrouter-worker"],
            answers=headers.get("x-mmrouter-answers", ""),
            exactness=exactness,
            overlap=int(headers["x-mmrouter-overlap-blocks"]),
            blocks=int(headers["x-mmrouter-prompt-blocks"]),
            block_size=block_size,
            prompt_tokens=int(headers["x-mmrouter-prompt-tokens"]),
            engine_tokens=int(usage.get("prompt_tokens", 0)),
            cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            before=self._blocks_before(request_id, block_size) if exactness == "partial" else None,
            recomputed=int(headers.get("x-mmrouter-recomputed-blocks", "0")),
            tier=int(headers["x-mmrouter-tier-blocks"]) if "x-mmrouter-tier-blocks" in headers else None,
        )

    def _body(self, text: str, images: Sequence[bytes]) -> dict[str, Any]:
        # More text than one block on both sides of the images, so that both sides have complete blocks.
        around = " ".join([text] * 40)
        content: list[dict[str, Any]] = [{"type": "text", "text": around}]
        for number, image in enumerate(images):
            # Text between images, too: the renderer of Gemma 3 refuses adjacent ones.
            content += [{"type": "text", "text": "and"}] if number else []
            shown = {"type": "image_url", "image_url": {"url": data_uri(image)}}
            content.append(shown if self._with_images else {"type": "text", "text": sha256(image).hexdigest()})
        content.append({"type": "text", "text": around})
        messages = [{"role": "user", "content": content}]
        return {"model": self._model, "messages": messages, "max_tokens": 2, "temperature": 0}


def _not_allowed(result: Observation, *, strict: bool) -> str | None:
    """Return why a request's exactness is insufficient, ``None`` where it suffices."""
    if result.exactness == "exact" or (result.exactness == "partial" and not strict):
        return None
    return f"{result.request_id} is {result.exactness}, not exact"


def check_repeats(name: str, first: Observation, repeats: Sequence[Observation], *, strict: bool) -> Check:
    """Check that every repeat hits its promised blocks, on the engine of the first request."""
    for result in repeats:
        if (refused := _not_allowed(result, strict=strict)) is not None:
            return Check(name, False, refused)
    rates = [min(1.0, result.overlap / result.promised) for result in repeats if result.promised]
    rate = sum(rates) / len(rates) if rates else 0.0
    for result in repeats:
        if not result.whole_hit:
            blocks = f"{result.overlap} of {result.promised} blocks"
            difference = f"{blocks} predicted on {result.worker}, first sent to {first.worker}"
            return Check(name, False, f"{result.request_id}: {difference}; mean hit rate {rate:.3f}, not 1.0")
        # With separate prefill, the answering engine holds the computed blocks too.
        if result.worker not in (first.worker, first.answers):
            return Check(name, False, f"{result.request_id} went to {result.worker}, first sent to {first.worker}")
    allowed = "" if all(s.exactness == "exact" for s in repeats) else ", of the blocks before the first image"
    return Check(name, True, f"mean predicted hit rate {rate:.3f} over {len(repeats)} on {repeats[0].worker}{allowed}")


def check_parts(name: str, result: Observation, like: Observation) -> Check:
    """Check that a text which parts from another one hits less than it, as many tokens as the engine says."""
    if result.overlap >= min(result.blocks, like.blocks):
        difference = f"predicted {result.overlap} held blocks of {result.blocks}"
        return Check(name, False, f"{result.request_id}: {difference}: a different text is treated as equal")
    agree = check_cached_tokens(name, [result])
    return agree._replace(message=f"{result.overlap} of {like.blocks} blocks") if agree.passed else agree


def check_cached_tokens(name: str, repeats: Sequence[Observation]) -> Check:
    """Check that the engine served the predicted tokens from its cache, or at least those for a partial prediction."""
    for result in repeats:
        if result.cached is None:
            return Check(name, False, f"{result.request_id}: cached_tokens is absent")
        held, cached = result.overlap + (result.tier or 0), result.cached
        expected = expected_cached(held, result.block_size, result.engine_tokens)
        if result.tier is not None:
            # It counts a last block that it loads from a lower tier, although it computes the last token anew.
            cached = min(cached, expected_cached(result.blocks, result.block_size, result.engine_tokens))
        if cached < expected or (result.exactness == "exact" and cached != expected):
            predicted = f"{held} blocks of {result.block_size} make {expected}"
            return Check(name, False, f"{result.request_id}: the engine says {result.cached}, {predicted}")
    return Check(name, True, f"{repeats[0].cached} tokens, as predicted")


def as_json(checks: Iterable[Check]) -> dict[str, Any]:
    rows = [check._asdict() for check in checks]
    return {"passed": bool(rows) and all(row["passed"] for row in rows), "checks": rows}
