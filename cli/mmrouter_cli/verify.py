"""The gate (docs/exactness.md): is routing exact, right now, end to end? Fails closed.

Per round, under text that nobody has sent before: a request three times, then the same text with another image. The
repeats must be predicted whole (hit rate 1.0), land where the first one went, and the engine's own ``cached_tokens``
must agree; the other image must not hit past the text before it. Two images and the same two swapped must part at the
first, and the same two in the same order must hit whole: a miss alone could be a cache that never held them. Rounds
with fresh text make a pass by luck of placement as unlikely as it is worthless.

Strict, which is the default, every request must be `exact`. Otherwise a `partial` one is held to what it promises: the
blocks before its first image, nothing after, and never more than the engine really had. `affinity` always fails.
"""

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from mmrouter_cli.sample_images import data_uri, picture
from mmrouter_cli.status.control_endpoint import ControlEndpoint

ROUNDS = 3
NOT_PROBED = "not_probed"
"""The cause of a pod that no router can prove by itself: the gate's requests go through it, or it stays unproved."""
SETTLE_SECONDS = 3.0
"""Events take milliseconds to arrive; where they do not come, the repeats show it."""
SETTLE_STEP_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold; ``message`` says what was seen, and names the first difference where it does not."""

    name: str
    passed: bool
    message: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What one request showed. ``cached`` is the engine's own count, ``None`` where it did not say."""

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
    """Complete blocks before the first image; ``None`` where nobody asked."""

    @property
    def promised(self) -> int | None:
        """Blocks that a repeat of this request hits: all where the prediction is exact, those before an image where
        it is partial; ``None`` where nothing is promised."""
        return self.blocks if self.exactness == "exact" else self.before if self.exactness == "partial" else None

    def expected_cached(self, blocks: int) -> int:
        """``cached_tokens`` for so many held blocks: an engine never serves the last token from its cache."""
        return min(blocks * self.block_size, (self.engine_tokens - 1) // self.block_size * self.block_size)


class GateError(Exception):
    """The gate cannot even ask; the message says why. Counts as a failure."""


class Gate:
    """Sends the gate's requests and judges what comes back."""

    def __init__(
        self, reach: ControlEndpoint, *, api_key: str | None, client: httpx.Client, strict: bool = True
    ) -> None:
        self._reach, self._client, self._strict = reach, client, strict
        self._headers = {"x-mmrouter-control": reach.token}
        self._dry_headers = dict(reach.authorization)
        if api_key:
            self._dry_headers["x-mmrouter-api-key"] = api_key
            self._headers["authorization"] = f"Bearer {api_key}"
        self._model = ""

    def run(self, rounds: int = ROUNDS) -> list[Check]:
        """Return every check, in order. Never raises for what the deployment does: that is a failed check."""
        try:
            self._model = self._served_model()
            checks = [self._verified()]
            for number in range(1, rounds + 1):
                checks += self._round(number)
            return checks
        except (GateError, httpx.HTTPError) as error:
            return [Check("reachable", False, str(error) or type(error).__name__)]

    def _verified(self) -> Check:
        states = [self._control(control, "/control/state") for control in self._reach.controls]
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
        first_image, other_image = picture(nonce + "a"), picture(nonce + "b")
        name = f"round {number}"
        first = self._send(nonce, [first_image])
        checks = [self._exact(f"{name}: exact", first)]
        if not checks[0].passed:
            return checks
        self._settle(nonce, [first_image], first)
        repeats = [self._send(nonce, [first_image]) for _ in range(2)]
        checks.append(_repeats(f"{name}: repeats are whole hits", first, repeats, strict=self._strict))
        checks.append(_agree(f"{name}: cached_tokens agree", repeats))
        checks.append(self._misses(f"{name}: another image misses", nonce, [other_image], first))
        pair = self._send(nonce + " pair", [first_image, other_image])
        self._settle(nonce + " pair", [first_image, other_image], pair)
        checks.append(self._misses(f"{name}: swapped images part", nonce + " pair", [other_image, first_image], pair))
        again = [self._send(nonce + " pair", [first_image, other_image])]
        checks.append(_repeats(f"{name}: the same order is a whole hit", pair, again, strict=self._strict))
        checks.append(_agree(f"{name}: cached_tokens of the same order", again))
        return checks

    def _exact(self, name: str, seen: Seen) -> Check:
        """The request is predicted as far as it must be, and as many tokens long as the engine says."""
        if (refused := _not_allowed(seen, strict=self._strict)) is not None:
            return Check(name, False, refused)
        if seen.prompt_tokens != seen.engine_tokens:
            said = f"predicted {seen.prompt_tokens} prompt tokens, the engine counted {seen.engine_tokens}"
            return Check(name, False, f"{seen.request_id}: {said}")
        if not seen.promised:
            return Check(name, False, f"{seen.request_id} has no complete block: nothing is proved")
        allowed = "" if seen.exactness == "exact" else f"; only {seen.exactness}, which --no-strict allows"
        return Check(name, True, f"{seen.prompt_tokens} tokens as the engine counts{allowed}")

    def _misses(self, name: str, text: str, images: Sequence[bytes], like: Seen) -> Check:
        """Another image under the same text: no hit from the first image's block on, predicted or real."""
        seen = self._send(text, images)
        if (refused := _not_allowed(seen, strict=self._strict)) is not None:
            return Check(name, False, refused)
        before = seen.before if seen.before is not None else self._blocks_before(seen.request_id, seen.block_size)
        if seen.overlap > before:
            said = f"predicted {seen.overlap} held blocks, only {before} stand before the first image"
            return Check(name, False, f"{seen.request_id}: {said}: a wrong image is taken as equal")
        if seen.cached is None:
            return Check(name, False, f"{seen.request_id}: cached_tokens is absent")
        if seen.cached > before * seen.block_size:
            said = (
                f"the engine served {seen.cached} tokens from its cache, {before * seen.block_size} at most are equal"
            )
            return Check(name, False, f"{seen.request_id}: {said}")
        return Check(name, True, f"{seen.overlap} of {like.blocks} blocks, {before} before the first image")

    def _blocks_before(self, request_id: str, block_size: int) -> int:
        """Complete blocks before a request's first image, as its decision has it."""
        for control in self._reach.controls:
            answer = self._client.get(f"{control}/control/decisions/{request_id}", headers=self._reach.authorization)
            if answer.status_code == 200:
                images = answer.json()["images"]
                if not images:
                    raise GateError(f"{request_id}: the decision names no image")
                return int(images[0]["offset"]) // block_size
        raise GateError(f"no frontend knows decision {request_id}")

    def _settle(self, text: str, images: Sequence[bytes], seen: Seen) -> None:
        """Wait until every frontend sees the request's blocks; where one never does, the repeats will show it."""
        body = self._body(text, images)
        deadline = time.monotonic() + SETTLE_SECONDS
        for control in self._reach.controls:
            while time.monotonic() < deadline:
                dry = self._client.post(f"{control}/control/explain", headers=self._dry_headers, json=body)
                if dry.status_code == 200 and dry.json()["overlap"] >= (seen.promised or 0):
                    break
                time.sleep(SETTLE_STEP_SECONDS)

    def _send(self, text: str, images: Sequence[bytes]) -> Seen:
        answer = self._client.post(
            f"{self._reach.url}/v1/chat/completions", headers=self._headers, json=self._body(text, images)
        )
        if answer.status_code != 200:
            raise GateError(f"the endpoint answered {answer.status_code}: {_said(answer)}")
        headers, usage = answer.headers, answer.json().get("usage") or {}
        if "x-mmrouter-exactness" not in headers:
            raise GateError("the endpoint does not show its decisions: the control token is wrong")
        request_id, exactness = headers["x-mmrouter-request-id"], headers["x-mmrouter-exactness"]
        block_size = int(headers["x-mmrouter-block-size"])
        return Seen(
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
        )

    def _body(self, text: str, images: Sequence[bytes]) -> dict[str, Any]:
        # Longer than one block of any accelerator before and after the images, so that both sides have whole blocks.
        around = " ".join([text] * 40)
        content: list[dict[str, Any]] = [{"type": "text", "text": around}]
        content += [{"type": "image_url", "image_url": {"url": data_uri(image)}} for image in images]
        content.append({"type": "text", "text": around})
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 2,
            "temperature": 0,
        }

    def _served_model(self) -> str:
        answer = self._client.get(f"{self._reach.url}/v1/models", headers=self._headers)
        if answer.status_code != 200:
            raise GateError(f"/v1/models answered {answer.status_code}: {_said(answer)}")
        return str(answer.json()["data"][0]["id"])

    def _control(self, control: str, path: str) -> Any:
        answer = self._client.get(control + path, headers=self._reach.authorization)
        if answer.status_code != 200:
            raise GateError(f"{control}{path} answered {answer.status_code}")
        return answer.json()


def _said(answer: httpx.Response) -> str:
    """Return the sentence of a refusal, and what to give where it is for want of a key."""
    try:
        text = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = answer.text[:300]
    return f"{text} (it wants a client's key: --api-key, or OPENAI_API_KEY)" if answer.status_code == 401 else text


def _not_allowed(seen: Seen, *, strict: bool) -> str | None:
    """Return why a request's exactness fails the gate, ``None`` where it does not."""
    if seen.exactness == "exact" or (seen.exactness == "partial" and not strict):
        return None
    return f"{seen.request_id} is {seen.exactness}, not exact"


def _repeats(name: str, first: Seen, repeats: Sequence[Seen], *, strict: bool) -> Check:
    """Every repeat hits all that it is promised, exactly: a hit rate of 1.0 over complete blocks."""
    for seen in repeats:
        if (refused := _not_allowed(seen, strict=strict)) is not None:
            return Check(name, False, refused)
    rates = [seen.overlap / seen.promised for seen in repeats if seen.promised]
    rate = sum(rates) / len(rates) if rates else 0.0
    for seen in repeats:
        if not seen.promised or seen.overlap != seen.promised:
            said = f"{seen.overlap} of {seen.promised} blocks predicted on {seen.worker}, first sent to {first.worker}"
            return Check(name, False, f"{seen.request_id}: {said}; mean hit rate {rate:.3f}, not 1.0")
        # After a chain of engines the one that answered holds what the other one computed.
        if seen.worker not in (first.worker, first.answers):
            return Check(name, False, f"{seen.request_id} went to {seen.worker}, first sent to {first.worker}")
    allowed = "" if all(s.exactness == "exact" for s in repeats) else ", of the blocks before the first image"
    return Check(name, True, f"mean predicted hit rate {rate:.3f} over {len(repeats)} on {repeats[0].worker}{allowed}")


def _agree(name: str, repeats: Sequence[Seen]) -> Check:
    """The engine served from its cache what was predicted; where only a part was predicted, at least that."""
    for seen in repeats:
        if seen.cached is None:
            return Check(name, False, f"{seen.request_id}: cached_tokens is absent")
        expected = seen.expected_cached(seen.overlap)
        if seen.cached < expected or (seen.exactness == "exact" and seen.cached != expected):
            said = f"the engine says {seen.cached}, {seen.overlap} blocks of {seen.block_size} make {expected}"
            return Check(name, False, f"{seen.request_id}: {said}")
    return Check(name, True, f"{repeats[0].cached} tokens, as predicted")


def as_json(checks: Iterable[Check]) -> dict[str, Any]:
    """The gate's result as plain values."""
    rows = [asdict(check) for check in checks]
    return {"passed": bool(rows) and all(row["passed"] for row in rows), "checks": rows}
