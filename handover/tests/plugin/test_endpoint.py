"""The plugin in a server that is not as it should be: routes with a reason, and a server that goes on."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from mmrouter_handover.plugin import WIRE_VERSION, wire
from mmrouter_handover.plugin.endpoint import Handover
from mmrouter_handover.plugin.supported_versions import KNOWN, why_other, why_unknown
from mmrouter_lib.engines.vllm import handover as vllm_handover

ROUTES = (wire.RENDER_PATH, wire.ITEMS_PATH, wire.RELEASE_PATH)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have ``import vllm`` find a release. The real one runs in tests/conformance."""

    def found(version: str) -> None:
        module = ModuleType("vllm")
        module.__version__ = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm", module)

    return found


async def ask(plugin: Handover, method: str, path: str) -> httpx.Response:
    app = FastAPI()
    plugin.attach_router(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        return await client.request(method, path, json={})


@pytest.mark.parametrize(
    ("version", "renderer", "says"),
    [
        ("0.33.0", None, "vLLM 0.33.0 is not known"),
        ("0.32.1", None, "vLLM 0.32.1 is not known"),
        (f"{KNOWN[0]}+cpu", None, "this vLLM's renderer has no _mm_executor"),
    ],
)
async def test_a_vllm_that_it_does_not_know_disables_it_with_a_reason_and_nothing_is_raised(
    release: Callable[[str], None], version: str, renderer: object, says: str
):
    release(version)
    plugin = Handover()
    state = SimpleNamespace(online_renderer=SimpleNamespace(renderer=renderer))
    await plugin.init_state(object(), state, SimpleNamespace())
    said = vllm_handover.read_status((await ask(plugin, "GET", wire.STATUS_PATH)).content)
    assert (said.enabled, said.version, said.role) == (False, WIRE_VERSION, "engine")
    assert says in said.reason
    assert not any(said.offers(way) for way in vllm_handover.WAYS)
    for path in ROUTES:
        answer = await ask(plugin, "POST", path)
        assert answer.status_code == 503
        assert says in answer.json()["error"]["message"]


async def test_a_failure_at_its_start_is_a_reason_too(release: Callable[[str], None]):
    release(KNOWN[0])
    plugin = Handover()
    cache = SimpleNamespace(**dict.fromkeys(("is_cached_item", "get_and_update_item", "touch_sender_cache_item")))
    cache.release_sender_touches = cache.clear_cache = None
    renderer = SimpleNamespace(_mm_executor=1, _mm_processor_cache=cache, _mm_processor_only_cache=cache)
    renderer.mm_processor = renderer.model_config = renderer
    await plugin.init_state(None, SimpleNamespace(online_renderer=SimpleNamespace(renderer=renderer)), None)
    assert (plugin.role, plugin.disabled) == (
        "renderer",
        "it failed to start: AttributeError: 'types.SimpleNamespace' object has no attribute 'config'",
    )
    assert renderer._mm_processor_cache is cache


def test_servers_that_cannot_hand_over_say_what_they_lack():
    assert why_unknown(KNOWN[0]) == why_unknown(KNOWN[0] + "+cpu") == ""
    whole = SimpleNamespace(_mm_executor=1, _mm_processor_cache=None, _mm_processor_only_cache=None, model_config=1)
    whole.mm_processor = None
    assert why_other(whole, "_mm_processor_cache") == "the model takes no images"
    whole.mm_processor = object()
    assert "without a processor cache" in why_other(whole, "_mm_processor_cache")
    whole._mm_processor_cache = object()
    assert why_other(whole, "_mm_processor_cache") == "this vLLM's processor cache has no is_cached_item"


def test_the_routers_side_and_the_plugins_side_speak_of_the_same_routes():
    names = ("STATUS_PATH", "RENDER_PATH", "ITEMS_PATH", "RELEASE_PATH", "WIRE_VERSION", "WAYS", "MAX_SECONDS")
    theirs = {**vars(wire), "WIRE_VERSION": WIRE_VERSION}
    assert [getattr(vllm_handover, name) for name in names] == [theirs[name] for name in names]
