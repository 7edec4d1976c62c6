"""The gate's judgement, on hand-made sightings: it passes only what is exact and fails on any doubt."""

import json
from dataclasses import dataclass, field, replace

import httpx
import pytest

from mmrouter_cli.status.control_endpoint import ControlEndpoint
from mmrouter_cli.verify import Observation, Verifier, as_json, check_cached_tokens, check_repeats, refusal_message

GOOD = Observation(
    "r-1", "a", "exact", overlap=6, blocks=6, block_size=16, prompt_tokens=100, engine_tokens=100, cached=96
)


@pytest.mark.parametrize(("tokens", "blocks", "cached"), [(100, 6, 96), (96, 6, 80), (97, 6, 96), (15, 0, 0)])
def test_an_engine_never_serves_the_last_token_from_its_cache(tokens, blocks, cached):
    assert replace(GOOD, engine_tokens=tokens).expected_cached(blocks) == cached


def test_whole_hits_on_the_same_worker_pass():
    assert check_repeats("x", GOOD, [GOOD, GOOD], strict=True).passed
    assert check_cached_tokens("x", [GOOD, GOOD]).passed


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"overlap": 5}, "5 of 6 blocks"),
        ({"worker": "b"}, "went to b"),
        ({"exactness": "partial"}, "partial, not exact"),
        ({"exactness": "affinity"}, "affinity, not exact"),
    ],
)
def test_one_bad_repeat_fails_and_is_named(broken, says):
    check = check_repeats("x", GOOD, [GOOD, replace(GOOD, **broken)], strict=True)
    assert not check.passed
    assert says in check.message


@pytest.mark.parametrize(("cached", "says"), [(None, "absent"), (80, "says 80"), (0, "says 0"), (100, "says 100")])
def test_cached_tokens_must_be_there_and_agree(cached, says):
    check = check_cached_tokens("x", [GOOD, replace(GOOD, cached=cached)])
    assert not check.passed
    assert says in check.message


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"engine_tokens": 101}, "the engine counted 101"),
        ({"blocks": 0}, "no complete block"),
        ({"exactness": "affinity"}, "not exact"),
    ],
)
def test_a_first_request_that_proves_nothing_fails(broken, says):
    check = gate()._exact("x", replace(GOOD, **broken))
    assert not check.passed
    assert says in check.message


def test_no_check_at_all_is_no_pass():
    assert not as_json([])["passed"]


PARTIAL = replace(GOOD, exactness="partial", overlap=2, before=2, cached=96)


def test_a_partial_decision_passes_only_without_strict_and_only_for_what_it_promises():
    assert not check_repeats("x", GOOD, [PARTIAL], strict=True).passed
    allowed = check_repeats("x", GOOD, [PARTIAL], strict=False)
    assert allowed.passed
    assert "before the first image" in allowed.message
    assert "--no-strict allows" in gate(strict=False)._exact("x", PARTIAL).message
    # An overlap past the image would be a false one, a shorter one a miss of what is known.
    for overlap in (1, 3, 6):
        assert not check_repeats("x", GOOD, [replace(PARTIAL, overlap=overlap)], strict=False).passed


def test_a_partial_decision_may_underestimate_the_engine_and_never_overestimate_it():
    assert check_cached_tokens("x", [PARTIAL]).passed
    assert not check_cached_tokens("x", [replace(PARTIAL, cached=16)]).passed


def test_affinity_fails_with_and_without_strict():
    for strict in (True, False):
        check = check_repeats("x", GOOD, [replace(GOOD, exactness="affinity")], strict=strict)
        assert "affinity, not exact" in check.message


@dataclass
class Deployment:
    """One worker behind a frontend, as the gate sees it, with knobs that break it."""

    block_size: int = 16
    exactness: str = "exact"
    ignores_images: bool = False
    ignores_order: bool = False
    forgets: bool = False
    pretends: int = 0
    held: list[list[str]] = field(default_factory=list)
    decisions: dict[str, int] = field(default_factory=dict)
    sent: int = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if path == "/control/state":
            return httpx.Response(200, json={"workers": [{"role": "worker", "standing": "verified", "cause": ""}]})
        if path.startswith("/control/decisions/"):
            offset = self.decisions[path.rpartition("/")[2]]
            return httpx.Response(200, json={"images": [{"offset": offset}]})
        units, before = self._units(json.loads(request.content))
        known = max((_common(units, other) for other in self.held), default=0)
        if path == "/control/explain":
            return httpx.Response(200, json={"overlap": known})
        if not self.forgets:
            self.held.append(units)
        return self._answer(units, before, known)

    def _units(self, body: dict) -> tuple[list[str], int]:
        """One text or image is one block here; a block's key is all that came before."""
        parts = body["messages"][0]["content"]
        names = [part["text"] if part["type"] == "text" else part["image_url"]["url"] for part in parts]
        if self.ignores_images:
            names = ["image" if part["type"] == "image_url" else part["text"] for part in parts]
        if self.ignores_order:
            images = sorted(part["image_url"]["url"] for part in parts if part["type"] == "image_url")
            names = [names[0], *images, names[-1]]
        return names, 1

    def _answer(self, units: list[str], before: int, known: int) -> httpx.Response:
        self.sent += 1
        request_id = f"r-{self.sent}"
        self.decisions[request_id] = before * self.block_size
        overlap = min(known, before) if self.exactness == "partial" else known
        headers = {
            "x-mmrouter-request-id": request_id,
            "x-mmrouter-worker": "w",
            "x-mmrouter-exactness": self.exactness,
            "x-mmrouter-overlap-blocks": str(overlap),
            "x-mmrouter-prompt-blocks": str(len(units)),
            "x-mmrouter-block-size": str(self.block_size),
            "x-mmrouter-prompt-tokens": str(len(units) * self.block_size + 1),
        }
        cached = known * self.block_size + self.pretends
        usage = {"prompt_tokens": len(units) * self.block_size + 1, "prompt_tokens_details": {"cached_tokens": cached}}
        return httpx.Response(200, headers=headers, json={"usage": usage})


def _common(left: list[str], right: list[str]) -> int:
    return next((n for n, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), len(left))


def gate(deployment: Deployment | None = None, *, strict: bool = True) -> Verifier:
    client = httpx.Client(transport=httpx.MockTransport(deployment or Deployment()))
    reach = ControlEndpoint("http://deployment", ("http://control",), "token")
    return Verifier(reach, api_key=None, client=client, strict=strict)


def test_a_correct_deployment_passes():
    checks = gate(Deployment()).run(rounds=2)
    assert [check for check in checks if not check.passed] == []
    assert len(checks) == 1 + 2 * 7


@pytest.mark.parametrize(
    ("broken", "failing"),
    [
        ({"ignores_images": True}, "round 1: another image misses"),
        ({"ignores_order": True}, "round 1: swapped images part"),
        ({"forgets": True}, "round 1: repeats are whole hits"),
        ({"pretends": 16}, "round 1: cached_tokens agree"),
        ({"exactness": "partial"}, "round 1: exact"),
        ({"exactness": "affinity"}, "round 1: exact"),
    ],
)
def test_a_broken_deployment_fails_at_the_check_that_is_about_it(monkeypatch, broken, failing):
    monkeypatch.setattr("mmrouter_cli.verify.SETTLE_SECONDS", 0.0)
    checks = gate(Deployment(**broken)).run(rounds=1)
    assert next(check.name for check in checks if not check.passed) == failing


def test_without_strict_a_deployment_that_predicts_up_to_the_image_passes_and_says_so():
    checks = gate(Deployment(exactness="partial"), strict=False).run(rounds=1)
    failed = {check.name for check in checks if not check.passed}
    assert failed == set()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            httpx.Response(401, json={"error": {"message": "No API key provided."}}),
            "provided. (it wants a client's key",
        ),
        (httpx.Response(429, json={"error": {"message": "All queues are full."}}), "All queues are full."),
        (httpx.Response(502, text="<html>"), "<html>"),
    ],
)
def test_a_refusal_is_shown_by_its_message(answer, says):
    assert says in refusal_message(answer)
    assert "{" not in refusal_message(answer)
