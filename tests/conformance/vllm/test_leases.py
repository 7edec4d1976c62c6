"""A real prefill engine with a short lease of its blocks: a request that would come too late is not sent to them.

A router in the test's own process follows the engines of a running deployment; its delivery to the answering engine can
be held, as a slow hand-over of images holds it.
"""

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conformance.conftest import Figure, Shrunk
from conformance.engine_process import engine_args, require_memory
from conformance.engines import REPOSITORY, deployed, manifest, pool
from local.rig import Deployment

from mmrouter_router.app import Router
from mmrouter_router.core.settings import load
from mmrouter_router.handover.request_delivery import AddressedRequest, BytesDelivery, Post, T
from mmrouter_router.request.prepared import CHAT

pytestmark = [pytest.mark.long_form, pytest.mark.proves("vllm", "prefill, decode", "qwen2_vl")]
LEASE = 6
CONNECTOR = {
    "kv_connector": "NixlConnector",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"kv_lease_duration": LEASE},
}
SOURCES = "vllm:prompt_tokens_by_source_total"


class HeldDelivery(BytesDelivery):
    """Holds a request to the answering engine for ``seconds``."""

    seconds = 0.0

    async def send(self, request: AddressedRequest, post: Post[T], transfers: list[dict[str, Any]]) -> T:
        if request.fields.get("kv_transfer_params"):
            await asyncio.sleep(self.seconds)
        return await super().send(request, post, transfers)


@pytest.fixture(scope="module")
def deployment(vllm_env: Path, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    require_memory()
    engine = {"type": "vllm", "args": engine_args(), "kvConnector": CONNECTOR}
    pools = [pool(role) for role in ("prefill", "decode")]
    made = manifest(shrunk(REPOSITORY), engine, pools, routing={"minPrefillTokens": 64})
    with deployed(vllm_env, tmp_path_factory.mktemp("leases"), made) as deployment:
        yield deployment


async def test_a_decode_after_the_lease_computes_the_prompt_and_one_before_reads_it(
    deployment: Deployment, figure: Figure
) -> None:
    (process,) = deployment.processes("router").values()
    names = ("MMROUTER_CONFIG", "MMROUTER_MODEL_DIR")
    router = Router(
        load({**{name: process.environ()[name] for name in names}, "POD_UID": "test", "POD_IP": "127.0.0.1"})
    )
    held = router.chat._forwarder._delivery = HeldDelivery()
    engines = {worker["role"]: worker["ip"] for worker in deployment.state()["workers"]}

    async def count(role: str, name: str, **labels: str) -> float:
        async with httpx.AsyncClient() as client:
            page = (await client.get(f"http://{engines[role]}:8000/metrics")).text
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line for line in page.splitlines() if line.startswith(name) and all(each in line for each in wanted)]
        return sum(float(line.split()[-1]) for line in lines)

    async with router.lifespan() as tasks:
        loops = [router._discover, router._verify_all, router._sweep]
        running = [tasks.create_task(loop()) for loop in loops]
        transport = httpx.ASGITransport(app=router.client_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=120) as client:
            async with asyncio.timeout(120):
                while not (router.ready and all(worker.canary == "True" for worker in router.fleet)):
                    await asyncio.sleep(0.1)

            async def ask() -> tuple[list[tuple[str, str]], list[str], float]:
                """Return stages, attempts, and how many tokens the decode engine fetched."""
                before = await count("decode", SOURCES, source="external_kv_transfer")
                text = f"{secrets.token_hex(8)} The chronicle tells of a harbour and of those who sail from it. " * 8
                body = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
                answer = await client.post(CHAT, json=body)
                assert answer.status_code == 200, answer.text
                trace = router.decisions.get(answer.headers["x-mmrouter-request-id"])
                assert trace is not None
                stages = [(stage["stage"], stage["outcome"]) for stage in trace.stages]
                fetched = await count("decode", SOURCES, source="external_kv_transfer") - before
                return stages, [attempt["outcome"] for attempt in trace.attempts], fetched

            stages, attempts, fetched = await ask()
            assert stages == [("prefill", "done"), ("answer", "first_byte")]
            assert (attempts, fetched > 64) == (["answered 200"], True)
            figure("tokens fetched", int(fetched))

            expired = await count("prefill", "vllm:nixl_num_kv_expired_reqs")
            held.seconds = LEASE
            stages, attempts, fetched = await ask()
            assert stages == [("prefill", "done"), ("prefill", "expired"), ("answer", "first_byte")]
            assert (attempts, fetched) == (["expired", "answered 200"], 0)
            assert await count("decode", "vllm:nixl_num_failed_transfers_total") == 0
            async with asyncio.timeout(60):
                # The lease that the router reckoned with is the engine's own.
                while await count("prefill", "vllm:nixl_num_kv_expired_reqs") == expired:
                    await asyncio.sleep(0.2)
        for task in (*running, *router._canaries.values(), *(task for _, task in router._feeds.values())):
            task.cancel()
