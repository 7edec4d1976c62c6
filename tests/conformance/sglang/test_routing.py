"""A real SGLang behind a real sidecar and router: learned and computed image identities never over-estimate a hit.

*learned*: Qwen2.5-VL without a preprocessing cache, so the engine's sentinels follow from pixels that only it has.
*artifact*: Qwen3-VL, whose sentinels the router computes once its canary has proved how.

SGLang publishes events with a delay (docs/engine-facts/sglang.md#block-size-and-timing), so every test waits for a
state, never for a time.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal
from zlib import crc32

import httpx
import pytest
from artefacts import Record
from conformance.conftest import Shrunk
from conformance.engine_process import BLOCK_SIZE, env_version, require_memory
from conformance.engines import Answer, History, deployed, sglang_manifest
from conformance.prediction import Report, image_places, repeats
from conformance.report import Cell, Cells
from conformance.scenarios import Hit, Scenario, scenarios, served_images, shared
from conformance.workload import Case, case, image_part, picture, said, user
from local.rig import Deployment, metric
from long_form import parameters
from scenarios import completions_repeat_whole, open_chat, several_prompts_and_an_echo_repeat_whole
from waiting import wait_for

MODELS = {"learned": "Qwen/Qwen2.5-VL-7B-Instruct", "artifact": "Qwen/Qwen3-VL-2B-Instruct"}
FAMILIES = {"learned": "qwen2_5_vl", "artifact": "qwen3_vl"}
PROVE_SECONDS = 120.0  # all of these bound a wait; a router trusts sightings a minute after its start
LEARN_SECONDS = 60.0
PUBLISH_SECONDS = 30.0
SIGHTING_SECONDS = 5.0
NO_CACHE = ("--mm-preprocess-cache-size-mb", "0")
"""What an operator writes to have the engine name images by their pixels."""
SHORT_RESPONSE = {"model": "demo", "max_output_tokens": 3, "temperature": 0}
_PICTURE = {"type": "input_image", "detail": "high"}
OTHER_TEXT = "A text of its own, in which a picture is shown so that a reader learns what it is. " * 2


@dataclass
class Served:
    provider: Literal["learned", "artifact"]
    deployment: Deployment
    repository: str
    answers: list[Answer] = field(default_factory=list)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        headers = {"x-mmrouter-control": self.deployment.token}
        answer = httpx.post(f"{self.deployment.url}{path}", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer

    def respond(self, one: Case) -> Answer:
        """Send a request of /v1/responses for one token; the engine takes two of its limit away."""
        answer = self.post("/v1/responses", {**SHORT_RESPONSE, "store": False, **one.body})
        usage = answer.json()["usage"]
        counted = {"prompt_tokens": usage["input_tokens"], "prompt_tokens_details": usage["input_tokens_details"]}
        assert usage["output_tokens"] == 1
        made = Answer(one, answer.headers, counted, self.deployment.decision(answer))
        self.answers.append(made)
        assert (made.exactness, made.predicted_tokens) == ("exact", made.tokens), one.name
        return made

    def ask(self, one: Case) -> Answer:
        """Send a request; the promised overlap never exceeds the engine's hit."""
        answer = self.post("/v1/chat/completions", self._body(one))
        made = Answer(one, answer.headers, answer.json()["usage"], self.deployment.decision(answer))
        self.answers.append(made)
        assert made.predicted_tokens == made.tokens, one.name
        assert made.promised <= made.cached, one.name
        if made.exactness != "exact":
            assert (self.provider, made.exactness) == ("learned", "partial"), one.name
            assert made.decision["reasons"][0].startswith("learning:messages["), made.decision["reasons"]
            assert made.overlap <= made.before_image, one.name
        return made

    def known(self, one: Case) -> Answer:
        """Repeat the request until every image is known; the router probes an image after its second request."""
        answer = wait_for(partial(self._exact, one), LEARN_SECONDS, f"{one.name}: the images are known")
        assert isinstance(answer, Answer)
        return answer

    def _exact(self, one: Case) -> Answer | None:
        answer = self.ask(one)
        return answer if answer.exactness == "exact" else None

    def foreseen(self, one: Case) -> str:
        with self.deployment.control() as control:
            response = control.post("/control/explain", json=self._body(one))
        assert response.status_code == 200, response.text
        return str(response.json()["exactness"])

    def published(self, answer: Answer) -> Answer:
        """Wait until the router's index has every predicted key: the engine has published each of them."""
        wait_for(lambda: set(answer.keys) <= self.index(), PUBLISH_SECONDS, f"{answer.case.name}: its keys came")
        return answer

    def _body(self, one: Case) -> dict[str, Any]:
        return {"model": "demo", "max_tokens": 1, "temperature": 0, **one.body}

    def index(self) -> set[str]:
        (worker,) = self.deployment.state()["workers"]
        return set(self.deployment.keys(worker["uid"])["keys"].get("0", ()))

    def became(self, event: str) -> int:
        return int(self.deployment.metric("mmrouter_sentinels_total", event=event))


@pytest.fixture(scope="module", params=parameters(MODELS, "learned"))
def served(
    request: pytest.FixtureRequest, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory, cells: Cells
) -> Iterator[Served]:
    provider: Literal["learned", "artifact"] = request.param
    repository = MODELS[provider]
    # The artifact provider's cell is of the run that compares every page; here it is the same engine, routed.
    row = cells.of("sglang", "qwen2_5_vl", "learned") if provider == "learned" else nullcontext(Cell("", ""))
    with row as cell:
        require_memory()
        env: Path = request.getfixturevalue("sglang_env")
        cell.version, cell.note = env_version(env), "through router and sidecar"
        args = ("--enable-response-store", *(NO_CACHE if provider == "learned" else ()))
        written = sglang_manifest(shrunk(repository), repository, [("worker", 1)], *args)
    with deployed(env, tmp_path_factory.mktemp(f"sglang-{provider}"), written) as deployment:
        wait_for(deployment.settled, PROVE_SECONDS, "a verified engine")
        yield Served(provider, deployment, repository)


def test_the_canary_proves_the_engine(served: Served) -> None:
    (worker,) = served.deployment.state()["workers"]
    assert (worker["standing"], worker["canary"]) == ("verified", "True"), worker
    assert served.became("calibrated") == (served.provider == "artifact")
    assert served.became("demoted") == 0


def test_the_ten_scenarios_once_the_images_are_known(served: Served, cells: Cells, record: Record) -> None:
    with served_images() as origin:
        ten = scenarios(origin)
        results = {one.name: routed(served, one) for one in ten}
    record(f"routing, sglang {served.provider}: scenarios", sum(not found for found in results.values()))
    if served.provider == "learned":
        cells.scenarios("sglang", "qwen2_5_vl", results, provider="learned")
        assert any(answer.exactness == "partial" for answer in served.answers)  # there was something to learn
    assert len(results) == 10
    assert {name: found for name, found in results.items() if found} == {}


def routed(served: Served, scenario: Scenario) -> list[str]:
    """Send a scenario once its images are known, and say what was predicted or hit otherwise than it must be."""
    for url in dict.fromkeys(url for one in scenario.cases for _, _, url in image_places(one)):
        part = {"type": "image_url", "image_url": {"url": url}}
        served.known(
            case(f"an image of a scenario {crc32(url.encode()):x}", said("system", OTHER_TEXT), user(part, OTHER_TEXT))
        )
    found: list[str] = []
    before: Answer | None = None
    for one, hit in zip(scenario.cases, ("first", *scenario.hits), strict=True):
        answer = served.published(served.ask(one))
        want = expected(hit, answer, before)
        outcome = (answer.exactness, answer.overlap, answer.cached)
        if outcome != ("exact", want, min(want * BLOCK_SIZE, answer.most)) or (before is not None and want == 0):
            found.append(f"{one.name}: exact with {want} blocks of hit expected, {outcome} told")
        before = answer
    provider = before.decision["identity"]["provider"] if before and before.decision["images"] else served.provider
    return found if provider == served.provider else [*found, f"identities are {provider}"]


def expected(hit: Hit | Literal["first"], answer: Answer, before: Answer | None) -> int:
    """Return the blocks that must be predicted and hit; the first request of a scenario finds what its text shares."""
    match hit:
        case "whole":
            return answer.blocks
        case "before image":
            return answer.before_image
        case "common":
            assert before is not None
            return shared(before.keys, answer.keys)
    return answer.overlap


def test_a_repeat_is_a_whole_hit_and_another_image_hits_the_text_before_it_alone(served: Served) -> None:
    text = f"The {served.provider} round: the picture below is described in one sentence, whatever it shows. " * 6
    one, other = (
        case(f"picture {seed}", user(text, image_part(picture(224, 224, seed=seed)), text[:200])) for seed in (501, 502)
    )
    first = served.published(served.known(one))
    for again in (served.ask(one), served.ask(one)):
        assert (again.exactness, again.overlap, again.cached) == ("exact", again.blocks, again.most)
        assert again.keys == first.keys
        assert again.decision["identity"]["provider"] == served.provider
    seen = served.ask(other)  # with the learned provider it is not known what it is, only that it is another one
    assert (seen.overlap, seen.cached) == (first.before_image, first.before_image * BLOCK_SIZE)
    assert seen.exactness == ("partial" if served.provider == "learned" else "exact")
    served.published(served.known(other))


def test_a_single_request_is_enough_to_know_its_image(served: Served) -> None:
    """A computed identity is known before the request, a learned one once its blocks are published, without a probe.

    A router ignores observations in its first minute, so more than one picture may be needed."""
    probes_before = served.became("asked")
    first_seen = "exact" if served.provider == "artifact" else "partial"
    seeds = count(700)
    tried: list[Case] = []

    def taught() -> bool:
        """Send a new picture once, at a new place; return whether that made it known."""
        seed = next(seeds)
        text = f"Picture {seed} is shown a single time. {OTHER_TEXT}"
        one = case(f"seen once {seed}", user(text, image_part(picture(168, 168, seed=seed)), OTHER_TEXT))
        tried.append(one)
        assert served.ask(one).exactness == first_seen
        deadline = monotonic() + SIGHTING_SECONDS
        while monotonic() < deadline:
            if served.foreseen(one) == "exact":
                return True
            sleep(0.1)
        return False

    wait_for(taught, PROVE_SECONDS, "a sighting teaches an image")
    assert (served.became("learned") > 0) == (served.provider == "learned")
    again = served.ask(tried[-1])
    assert (again.exactness, served.became("asked")) == ("exact", probes_before)
    again = served.ask(served.published(again).case)
    assert (again.exactness, again.overlap, again.cached) == ("exact", again.blocks, again.most)
    for one in tried:
        served.published(served.known(one))


def test_the_engine_publishes_the_predicted_blocks_of_a_completion_and_no_others(served: Served) -> None:
    with open_chat(served.deployment, max_retries=0) as chat:
        keys = completions_repeat_whole(chat)
    held = history(served)
    roots = {held[key] for key in keys}
    assert {key for key, root in held.items() if root in roots} == keys


def test_each_of_several_prompts_finds_its_own_blocks_and_an_echo_reads_the_cache(served: Served) -> None:
    (worker,) = served.deployment.state()["workers"]
    with open_chat(served.deployment, max_retries=0) as chat:
        several_prompts_and_an_echo_repeat_whole(chat, lambda: metric(worker["ip"], "sglang:cached_tokens_total", 8000))


def test_responses_are_exact_with_images_tools_and_turns_and_their_repeats_are_whole_hits(served: Served) -> None:
    url = image_part(picture(196, 196, seed=811))["image_url"]["url"]
    shown = user({"type": "image_url", "image_url": {"url": url}}, OTHER_TEXT)
    served.published(served.known(case("the picture of a response", shown)))
    look = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "the quay"}'}
    asked = {"role": "user", "content": [{"type": "input_text", "text": OTHER_TEXT}, _PICTURE | {"image_url": url}]}
    turn = [asked, said("assistant", "A quay."), said("assistant", "At night."), call]
    seen = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "A lamp."}]}
    later = [*turn, seen, said("developer", "Answer in one word."), user("Where?")]
    for name, body in {
        "text": {"input": f"{OTHER_TEXT} What is it?", "instructions": "Be brief."},
        "image": {"input": [asked], "tools": [look], "reasoning": {"effort": "low"}},
        "turns": {"input": later, "tools": [look]},
    }.items():
        first = served.published(served.respond(Case(f"response, {name}", body)))
        again = served.respond(first.case)
        assert (again.overlap, again.cached) == (again.blocks, again.most), name
        assert again.keys == first.keys


def test_the_engines_own_history_is_what_was_predicted(served: Served, cells: Cells, record: Record) -> None:
    """The index equals the engine's replayed events, and every block below a text of these tests was predicted.

    Other texts are the router's probes."""
    exact = [answer for answer in served.answers if answer.exactness == "exact"]
    assert {answer.case.name for answer in exact} == {answer.case.name for answer in served.answers}
    predicted = {key for answer in exact for key in answer.keys}
    ours = {answer.keys[0] for answer in exact}
    wait_for(lambda: set(history(served)) == served.index(), PUBLISH_SECONDS, "index and engine agree")
    blocks = {key for key, root in history(served).items() if root in ours}
    hits, most = repeats((answer.case, answer.cached, answer.tokens) for answer in served.answers)
    report = Report(
        requests=len(served.answers),
        blocks=len(blocks),
        matched=len(blocks & predicted),
        mismatches=[
            *(f"{key}: published, never predicted" for key in sorted(blocks - predicted)),
            *(f"{key}: predicted, never published" for key in sorted(predicted - blocks)),
        ],
    )
    record(f"routing, sglang {served.provider}", report.line)
    record(f"routing, sglang {served.provider}: blocks that repeats hit, and could", (hits, most))
    if served.provider == "learned":
        cells.compared("sglang", "qwen2_5_vl", report, (hits, most), provider="learned")
    assert report.mismatches == []
    assert report.blocks > 50
    assert 0 < hits == most


def test_a_stored_response_is_exact_and_is_retrieved_continued_and_cancelled(served: Served) -> None:
    path, given = "/v1/responses", {**SHORT_RESPONSE, "input": f"To be stored. {OTHER_TEXT}"}
    first = served.post(path, given)
    counted, name = first.json()["usage"]["input_tokens"], first.json()["id"]
    assert first.headers["x-mmrouter-exactness"] == "exact"
    assert int(first.headers["x-mmrouter-prompt-tokens"]) == counted
    assert httpx.get(f"{served.deployment.url}{path}/{name}", timeout=60).json() == first.json()
    asked = {**SHORT_RESPONSE, "input": "And then?", "previous_response_id": name}
    later = served.post(path, asked)
    assert later.headers["x-mmrouter-exactness"] == "affinity"
    assert later.json()["usage"]["input_tokens"] > counted
    queued = served.post(path, {**given, "max_output_tokens": 400, "background": True}).json()["id"]
    ended = served.post(f"{path}/{queued}/cancel", {}).json()
    assert ended["id"] == queued
    assert ended["status"] in ("cancelled", "completed", "incomplete")  # a busy machine may be late


def history(served: Served) -> dict[str, str]:
    """Return what the engine holds by its own replayed events alone: key -> first key of its chain."""
    (worker,) = served.deployment.state()["workers"]
    return History(served.deployment, worker["ip"], served.repository, "sglang").roots()
