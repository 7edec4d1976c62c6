"""The hand-over plugin in real pods of images without it, in a namespace that admits restricted pods only."""

from collections.abc import Iterator

import pytest
from cluster.access import Access
from cluster.resources import condition
from e2e.deploying import RESTRICTED, Deployed, deploy, example, make_model
from e2e.endpoints import reached

from mmrouter_lib.api.pod_paths import PLUGIN_DIR
from mmrouter_operator.render.pod.handover_plugin import NAME

ALWAYS = [{"name": "MMROUTER_HANDOVER", "value": "always"}]
"""Also where bytes were the cheaper way, as they are for small images."""


@pytest.fixture(scope="module")
def plugged(operated: Access) -> Iterator[Deployed]:
    """A renderer and an engine that share no memory."""
    with operated.namespace(**RESTRICTED) as namespace:
        make_model(operated, namespace)
        body = example()
        body["spec"]["frontend"] = {
            "replicas": 1,
            "podTemplate": {"spec": {"containers": [{"name": "router", "env": ALWAYS}]}},
        }
        body["spec"]["routing"] = {"transfer": "nixl"}
        pool = {"replicas": 1, "accelerator": {"kind": "cpu"}}
        body["spec"]["pools"] = [{"name": role, "role": role, **pool} for role in ("worker", "renderer")]
        yield deploy(operated, namespace, body)


def test_an_init_container_brings_the_plugin_and_the_engines_own_command_runs_with_it(plugged: Deployed) -> None:
    for role in ("worker", "renderer"):
        (pod,) = plugged.pods(role)
        images = {one["name"]: one["image"] for one in (*pod["spec"]["initContainers"], *pod["spec"]["containers"])}
        assert images[NAME] != images["engine"]
        name = pod["metadata"]["name"]
        said = plugged.execute(
            name, "engine", "sh", "-c", "tr '\\0' '\\n' </proc/1/environ; tr '\\0' ' ' </proc/1/cmdline"
        )
        assert said.returncode == 0, said.stderr
        assert f"PYTHONPATH={PLUGIN_DIR}" in said.stdout
        assert "VLLM_PLUGINS=mmrouter\n" in said.stdout
        assert f"vllm {'launch render' if role == 'renderer' else 'serve'} " in said.stdout.splitlines()[-1]
        wrote = plugged.execute(name, "engine", "touch", f"{PLUGIN_DIR}/x")
        assert wrote.returncode != 0, "the engine cannot change it"
    assert condition(plugged.cluster, "PodSecurityRestricted", plugged.namespace, plugged.name)["status"] == "True"


def test_what_the_renderer_processed_reaches_the_engine_by_the_last_way_that_is_left(plugged: Deployed) -> None:
    """Simulated engines have no NIXL, and pods of scope pod share no memory."""
    with reached(plugged) as place, place.chat(plugged.name) as chat:
        raw = chat.client.chat.completions.with_raw_response.create(
            model=plugged.name, messages=chat.messages(chat.image("plugin"), "what?"), max_tokens=3
        )
        path = f"/control/decisions/{raw.headers['x-mmrouter-request-id']}"
        decision = chat.controls[0].get(path).raise_for_status().json()
    (one,) = decision["travelled"]
    assert one["how"] == "inline", decision["travelled"]
    assert {each["how"] for each in one["instead_of"]} >= {"nixl"}
