"""The gate's judgement, on hand-made sightings: it passes only what is exact and fails on any doubt; and the demo's."""

import io
import json
from dataclasses import dataclass, field, replace
from itertools import pairwise

import httpx
import pytest
from rich.console import Console

from mmrouter_cli.chat_probe import expected_cached, refusal_message
from mmrouter_cli.demo_workload import DemoResult, Step, StepRow, hit_ratio, repeat_failure, show, workload
from mmrouter_cli.status.control_api import ControlEndpoint
from mmrouter_cli.verify import Observation, Verifier, as_json, check_cached_tokens, check_repeats

GOOD = Observation(
    "r-1", "a", "exact", overlap=6, blocks=6, block_size=16, prompt_tokens=100, engine_tokens=100, cached=96
)


@pytest.mark.parametrize(("tokens", "blocks", "cached"), [(100, 6, 96), (96, 6, 80), (97, 6, 96), (15, 0, 0)])
def test_an_engine_never_serves_the_last_token_from_its_cache(tokens, blocks, cached):
    assert expected_cached(blocks, 16, tokens) == cached


def test_whole_hits_on_the_same_worker_pass():
    assert check_repeats("x", GOOD, [GOOD, GOOD], strict=True).passed
    assert check_cached_tokens("x", [GOOD, GOOD]).passed
    assert not as_json([])["passed"], "no check at all is no pass"


@pytest.mark.parametrize(("overlap", "passed"), [(6, True), (5, True), (4, False), (7, False)])
def test_the_last_block_of_a_prompt_of_whole_blocks_may_be_held_or_not(overlap, passed):
    whole = replace(GOOD, prompt_tokens=96, engine_tokens=96, overlap=overlap, cached=80)
    assert check_repeats("x", whole, [whole], strict=True).passed is passed


def test_a_block_that_is_computed_anew_for_a_drafter_is_not_expected():
    short = replace(GOOD, overlap=5, cached=80, recomputed=1)
    assert check_repeats("x", short, [short], strict=True).passed
    assert check_cached_tokens("x", [short]).passed


def test_a_last_block_loaded_from_a_lower_tier_is_expected_of_engines_with_one_alone():
    whole = replace(GOOD, prompt_tokens=96, engine_tokens=96, cached=96)
    assert not check_cached_tokens("x", [whole]).passed
    assert check_cached_tokens("x", [replace(whole, tier=0)]).passed
    assert check_cached_tokens("x", [replace(whole, tier=0, cached=80)]).passed
    assert not check_cached_tokens("x", [replace(whole, tier=0, cached=64)]).passed


def test_blocks_of_lower_tiers_are_hits():
    below = replace(GOOD, overlap=2, tier=4)
    assert check_repeats("x", below, [below], strict=True).passed
    assert check_cached_tokens("x", [below]).passed
    assert not check_cached_tokens("x", [replace(below, tier=3)]).passed


def repeated(**broken):
    return check_repeats("x", GOOD, [GOOD, replace(GOOD, **broken)], strict=True)


def counted(cached):
    return check_cached_tokens("x", [GOOD, replace(GOOD, cached=cached)])


def first(**broken):
    return gate()._exact("x", replace(GOOD, **broken))


@pytest.mark.parametrize(
    ("check", "value", "says"),
    [
        (repeated, {"overlap": 5}, "5 of 6 blocks"),
        (repeated, {"worker": "b"}, "went to b"),
        (repeated, {"exactness": "partial"}, "partial, not exact"),
        (repeated, {"exactness": "affinity"}, "affinity, not exact"),
        (counted, {"cached": None}, "absent"),
        (counted, {"cached": 80}, "says 80"),
        (counted, {"cached": 0}, "says 0"),
        (counted, {"cached": 100}, "says 100"),
        (first, {"engine_tokens": 101}, "the engine counted 101"),
        (first, {"blocks": 0}, "no complete block"),
        (first, {"exactness": "affinity"}, "not exact"),
    ],
)
def test_a_bad_repeat_a_wrong_count_and_a_first_request_that_proves_nothing_fail_and_are_named(check, value, says):
    result = check(**value)
    assert not result.passed
    assert says in result.message


PARTIAL = replace(GOOD, exactness="partial", overlap=2, before=2, cached=96)


def test_a_partial_decision_passes_only_without_strict_and_only_for_what_it_promises():
    assert not check_repeats("x", GOOD, [PARTIAL], strict=True).passed
    allowed = check_repeats("x", GOOD, [PARTIAL], strict=False)
    assert allowed.passed
    assert "before the first image" in allowed.message
    assert "--no-strict allows" in gate(strict=False)._exact("x", PARTIAL).message
    affine = replace(GOOD, exactness="affinity")
    assert "affinity, not exact" in check_repeats("x", GOOD, [affine], strict=False).message
    # A shorter overlap misses what is known. A longer one passes a known image, if the engine confirms it.
    for overlap, passes in ((1, False), (3, True), (6, True), (7, False)):
        assert check_repeats("x", GOOD, [replace(PARTIAL, overlap=overlap)], strict=False).passed is passes
    assert not check_cached_tokens("x", [replace(PARTIAL, overlap=3, cached=32)]).passed
    # It may underestimate the engine and never overestimate it.
    assert check_cached_tokens("x", [PARTIAL]).passed
    assert not check_cached_tokens("x", [replace(PARTIAL, cached=16)]).passed


@dataclass
class Deployment:
    """One worker behind a frontend, as the gate sees it, with knobs that break it."""

    block_size: int = 16
    exactness: str = "exact"
    ignores_images: bool = False
    ignores_order: bool = False
    forgets: bool = False
    images_first: bool = False
    predicts_images: bool = True
    refuses_adjacent: bool = False
    pretends: int = 0
    held: list[list[str]] = field(default_factory=list)
    sent: int = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if path == "/control/state":
            workers = [{"role": "worker", "standing": "verified", "cause": ""}]
            return httpx.Response(200, json={"workers": workers, "predicts_images": self.predicts_images})
        if path.startswith("/control/decisions/"):
            return httpx.Response(200, json={"images": [{"offset": 0 if self.images_first else self.block_size}]})
        units = self._units(json.loads(request.content))
        lengths = range(len(units), 0, -1)
        known = next((n for n in lengths if any(other[:n] == units[:n] for other in self.held)), 0)
        if path == "/control/explain":
            return httpx.Response(200, json={"candidates": [{"overlap": known}]})
        if not self.forgets:
            self.held.append(units)
        return self._answer(units, known)

    def _units(self, body: dict) -> list[str]:
        """One text or image is one block here; a block's key is all that came before."""
        first, *parts, last = body["messages"][0]["content"]
        kinds = [part["type"] for part in parts]
        if self.refuses_adjacent and ("image_url", "image_url") in pairwise(kinds):
            self.exactness = "affinity"
        assert self.predicts_images == ("image_url" in kinds)
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        urls = urls or [part["text"] for part in parts if part["text"] != "and"]
        images = ["image" for _ in urls] if self.ignores_images else urls
        images = sorted(images) if self.ignores_order else images
        return [*images, first["text"], last["text"]] if self.images_first else [first["text"], *images, last["text"]]

    def _answer(self, units: list[str], known: int) -> httpx.Response:
        self.sent += 1
        request_id = f"r-{self.sent}"
        overlap = min(known, 1) if self.exactness == "partial" else known
        prompt_tokens = len(units) * self.block_size + 1
        decision = {
            **{"request-id": request_id, "worker": "w", "exactness": self.exactness, "overlap-blocks": overlap},
            **{"prompt-blocks": len(units), "block-size": self.block_size, "prompt-tokens": prompt_tokens},
        }
        headers = {f"x-mmrouter-{name}": str(value) for name, value in decision.items()}
        cached = known * self.block_size + self.pretends
        usage = {"prompt_tokens": prompt_tokens, "prompt_tokens_details": {"cached_tokens": cached}}
        return httpx.Response(200, headers=headers, json={"usage": usage})


def gate(deployment: Deployment | None = None, *, strict: bool = True) -> Verifier:
    client = httpx.Client(transport=httpx.MockTransport(deployment or Deployment()))
    reach = ControlEndpoint("http://deployment", ("http://control",), "token")
    return Verifier(reach, api_key=None, client=client, strict=strict)


@pytest.mark.parametrize(("exactness", "strict"), [("exact", True), ("partial", False)])
def test_a_correct_deployment_passes_and_one_that_predicts_up_to_the_image_only_without_strict(exactness, strict):
    checks = gate(Deployment(exactness=exactness), strict=strict).run(rounds=2)
    assert [check for check in checks if not check.passed] == []
    assert len(checks) == 1 + 2 * 7


def test_a_template_that_puts_images_before_the_text_passes():
    assert [check for check in gate(Deployment(images_first=True)).run(rounds=1) if not check.passed] == []


@pytest.mark.parametrize(
    ("broken", "failing"),
    [
        ({}, None),
        ({"ignores_images": True}, "round 1: another text misses"),
        ({"ignores_order": True}, "round 1: swapped texts part"),
        ({"pretends": 16}, "round 1: cached_tokens agree"),
        ({"exactness": "affinity"}, "round 1: exact"),
    ],
)
def test_a_deployment_that_predicts_no_images_is_checked_by_texts_in_their_place(broken, failing):
    checks = gate(Deployment(predicts_images=False, **broken)).run(rounds=1)
    assert next((check.name for check in checks if not check.passed), None) == failing


def test_a_family_whose_adjacent_images_are_not_rendered_passes():
    checks = gate(Deployment(refuses_adjacent=True)).run(rounds=1)
    assert [check for check in checks if not check.passed] == []


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


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (httpx.Response(401, json={"error": {"message": "No key."}}), "No key. (it wants a client's key"),
        (httpx.Response(429, json={"error": {"message": "All queues are full."}}), "All queues are full."),
        (httpx.Response(502, text="<html>"), "<html>"),
    ],
)
def test_a_refusal_is_shown_by_its_message(answer, says):
    assert says in refusal_message(answer)
    assert "{" not in refusal_message(answer)


def row(**values):
    base = {"name": "x", "worker": "a", "blocks": 6, "overlap": 6, "prompt_tokens": 100, "cached_tokens": 96}
    return StepRow(**{**base, "exactness": "exact", "why": "", "milliseconds": 1.0, **values})


def test_the_hit_ratio_is_a_ratio_of_sums_and_absent_counts_as_none():
    assert hit_ratio([row(), row(prompt_tokens=300, cached_tokens=-1)]) == 96 / 400
    assert hit_ratio([]) == 0


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_is_whole_on_any_terminal_and_names_arepeat_failure(width):
    file = io.StringIO()
    rows = [row(worker="demo-worker-0", why="cost 0 against 36", failure="expected a hit"), row(worker="demo-worker-1")]
    show(Console(file=file, width=width), DemoResult(rows, rows))
    out = file.getvalue()
    assert all(len(line) <= width for line in out.splitlines())
    assert all(part in out for part in ("demo-worker-0", "demo-worker-1", "expected a hit", "96.0%"))
    assert ("cost 0 against 36" in out) == (width == 140)


def test_a_repeat_must_be_an_exact_whole_hit_that_the_engine_confirms():
    repeat, trace = Step("x", (), repeats="y"), {"block_size": 16, "reasons": ["why"]}
    assert repeat_failure(repeat, row(), trace) == ""
    assert "affinity" in repeat_failure(repeat, row(exactness="affinity"), trace)
    assert "5 of 6" in repeat_failure(repeat, row(overlap=5), trace)
    assert repeat_failure(repeat, row(overlap=5, prompt_tokens=96, cached_tokens=80), trace) == ""
    assert "says 80" in repeat_failure(repeat, row(cached_tokens=80), trace)
    assert "says -1" in repeat_failure(repeat, row(cached_tokens=-1), trace)
    assert repeat_failure(Step("x", ()), row(overlap=0), trace) == ""


def test_every_repeat_names_a_step_of_the_same_prompt_before_it():
    steps = workload("nonce", "http://127.0.0.1:1")
    seen = {}
    for step in steps:
        if step.repeats:
            assert len(seen[step.repeats].messages) == len(step.messages)
        seen[step.name] = step
    assert sum(bool(step.repeats) for step in steps) >= 5
