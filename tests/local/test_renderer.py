"""A renderer pool: prompts of a family that a router does not know, and the second opinion on those that it does."""

import pytest
from local.rig import deployed, example, metric
from local.test_broken_routing import Second
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    resource = example()
    spec = resource["spec"]
    spec["frontend"] = {"replicas": 1, "service": {"port": 8000}}
    spec["verification"] = {"sampleRatio": "1"}
    spec["pools"][0]["replicas"] = 2
    spec["pools"].append({"name": "render", "role": "renderer", "replicas": 1, "accelerator": {"kind": "cpu"}})
    with deployed(tmp_path_factory.mktemp("renderer"), resource) as deployment:
        yield deployment


def forget_the_family(router) -> None:
    router.preparer.family = router.preparer.prompter = None
    router.preparer.unknown_family = "unheard_of"
    router.preparer.unpredicted = "family:unheard_of"


def lose_the_renderer(router) -> None:
    router.renderer.roster = lambda members: None


def sampled(second: Second, content) -> dict:
    """What a renderer made of a request."""
    decision = second.ask(content)
    return wait_for(lambda: second.control(decision)["rendering"], 30, "the sample was shown to the renderer")


def parity(second: Second, result: str, cause: str) -> float:
    return metric(second.ip, "mmrouter_parity_total", family="qwen2_vl", result=result, cause=cause)


def answering(second: Second) -> None:
    def verified() -> bool:
        return [one["verified"] for one in second.control("state")["renderers"]] == [True]

    wait_for(verified, 20, "the renderer answered")


def test_an_unknown_family_passes_gate_and_canary_by_its_renderer(demo):
    second = Second(demo, workers=2)
    with second.running(forget_the_family):
        answering(second)
        assert second.gate() is None
        assert second.compare() is None
        trace = second.control(second.ask("A bell rings over the empty quay. " * 6))
        assert (trace["exactness"], trace["reasons"]) == ("exact", ["renderer:unheard_of"])
        assert trace["blocks"] > 0


def test_without_an_answer_of_the_renderer_it_is_served_by_affinity_with_the_reason(demo):
    second = Second(demo, workers=2)

    def without(router):
        forget_the_family(router)
        lose_the_renderer(router)

    with second.running(without):
        trace = second.control(second.ask("A bell rings over the empty quay. " * 6))
        assert trace["exactness"] == "affinity"
        assert trace["reasons"] == ["renderer_unavailable:unheard_of", "family:unheard_of"]


def test_a_known_family_is_sampled_and_its_renderer_agrees(demo):
    second = Second(demo, workers=2)
    with second.running():
        answering(second)
        before = parity(second, "True", "")
        # Less than a block: nothing that the engine publishes, so what is counted is the rendering.
        found = sampled(second, "Hi")
        assert (found["result"], parity(second, "True", "") - before) == ("True", 1), found
        found = sampled(second, [image("quay"), {"type": "text", "text": "and"}, image("bell", 56)])
        assert found["result"] == "True", found
        assert found["tokens"] > 16


def test_a_template_that_is_not_the_renderers_is_counted_and_shown(demo, other_template):
    second = Second(demo, other_template, workers=2)
    with second.running():
        answering(second)
        found = sampled(second, "Hi")
        assert (found["result"], found["cause"]) == ("False", "template")
        assert (parity(second, "False", "template"), parity(second, "True", "")) == (1, 0)
        assert found["piece"]["predicted"]["text"].startswith("Hello!")
        assert not found["piece"]["rendered"]["text"].startswith("Hello!")


def test_a_renderer_that_is_gone_is_unknown_and_never_a_difference(demo):
    second = Second(demo, workers=2)
    with second.running(lose_the_renderer):
        found = sampled(second, "Hi")
        assert (found["result"], found["cause"]) == ("Unknown", "renderer_unavailable")
        assert parity(second, "Unknown", "renderer_unavailable") == 1


def image(seed: str, side: int = 112) -> dict:
    return {"type": "image_url", "image_url": {"url": data_uri(picture(seed, side, side))}}
