"""A plugin that cannot work answers with a reason, and the server runs on."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from mmrouter_handover.plugin import WIRE_VERSION, wire
from mmrouter_handover.plugin.endpoint import Handover
from mmrouter_handover.plugin.vllm_items import SUPPORTED_RELEASES, why_incompatible, why_unsupported
from mmrouter_lib.engines.vllm import handover as vllm_handover

ROUTES = (wire.RENDER_PATH, wire.ITEMS_PATH, wire.RELEASE_PATH)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make ``import vllm`` return a stub of a release. The real one runs in tests/conformance."""

    def stub(version: str) -> None:
        module = ModuleType("vllm")
        module.__version__ = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm", module)

    return stub


async def send(plugin: Handover, method: str, path: str) -> httpx.Response:
    app = FastAPI()
    plugin.attach_router(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        return await client.request(method, path, json={})


@pytest.mark.parametrize(
    ("version", "renderer", "message"),
    [
        ("0.33.0", None, "vLLM 0.33.0 is not known"),
        ("0.32.1", None, "vLLM 0.32.1 is not known"),
        (f"{SUPPORTED_RELEASES[0]}+cpu", None, "this vLLM's renderer has no _mm_executor"),
    ],
)
async def test_an_unsupported_vllm_disables_the_plugin_with_a_reason(
    release: Callable[[str], None], version: str, renderer: object, message: str
):
    release(version)
    plugin = Handover()
    state = SimpleNamespace(online_renderer=SimpleNamespace(renderer=renderer))
    await plugin.init_state(object(), state, SimpleNamespace())
    status = vllm_handover.read_status((await send(plugin, "GET", wire.STATUS_PATH)).content)
    assert (status.enabled, status.version, status.role) == (False, WIRE_VERSION, "engine")
    assert message in status.reason
    assert not any(status.offers(way) for way in vllm_handover.WAYS)
    for path in ROUTES:
        answer = await send(plugin, "POST", path)
        assert answer.status_code == 503
        assert message in answer.json()["error"]["message"]


async def test_an_exception_at_startup_disables_the_plugin_with_a_reason(release: Callable[[str], None]):
    release(SUPPORTED_RELEASES[0])
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


def test_a_server_without_a_needed_attribute_is_incompatible():
    assert why_unsupported(SUPPORTED_RELEASES[0]) == why_unsupported(SUPPORTED_RELEASES[0] + "+cpu") == ""
    whole = SimpleNamespace(_mm_executor=1, _mm_processor_cache=None, _mm_processor_only_cache=None, model_config=1)
    whole.mm_processor = None
    assert why_incompatible(whole, "_mm_processor_cache") == "the model takes no images"
    whole.mm_processor = object()
    assert "without a processor cache" in why_incompatible(whole, "_mm_processor_cache")
    whole._mm_processor_cache = object()
    assert why_incompatible(whole, "_mm_processor_cache") == "this vLLM's processor cache has no is_cached_item"


def test_the_router_and_the_plugin_have_the_same_routes_and_constants():
    names = ("STATUS_PATH", "RENDER_PATH", "ITEMS_PATH", "RELEASE_PATH", "WIRE_VERSION", "WAYS", "MAX_SECONDS")
    theirs = {**vars(wire), "WIRE_VERSION": WIRE_VERSION}
    assert [getattr(vllm_handover, name) for name in names] == [theirs[name] for name in names]
