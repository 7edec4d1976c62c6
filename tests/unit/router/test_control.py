"""The control port: nobody without the token learns anything, and who tries is counted."""

import httpx
import pytest
from unit.router.frontend import PORT, Frontend

PATHS = ("/control/state", "/control/stream", "/control/decisions", "/control/workers/x/keys")


def counted(frontend: Frontend) -> dict[str, float]:
    (family,) = frontend.refusals.collect()
    return {sample.labels["reason"]: sample.value for sample in family.samples if sample.name.endswith("_total")}


@pytest.mark.parametrize("path", PATHS)
async def test_control_port_requires_the_token_and_counts_refusals_by_reason(path):
    frontend = await Frontend(token="right").start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{frontend.ip}:{PORT}", trust_env=False) as client:
            for number, value in enumerate(("Bearer wrong", "right", "Bearer"), 1):
                answer = await client.get(path, headers={"authorization": value})
                assert answer.status_code == 401
                assert "token" in answer.json()["detail"]
                assert counted(frontend) == {"wrong": number}
            assert (await client.get(path)).status_code == 401
            assert counted(frontend) == {"wrong": 3, "missing": 1}
            state = await client.get("/control/state", headers={"authorization": "Bearer right"})
            assert state.status_code == 200
            assert counted(frontend) == {"wrong": 3, "missing": 1}
    finally:
        await frontend.stop()
