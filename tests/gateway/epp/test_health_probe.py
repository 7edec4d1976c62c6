"""The probe of `mmrouter doctor` at our picker: TLS with any certificate, plain HTTP/2, and what fails."""

import asyncio

import pytest
from gateway.epp.conftest import SECONDS, serving
from unit.router.rig import loopback

from mmrouter_cli.doctor.picker_health import PickerHealth, picker_health
from mmrouter_router.http.certificate import self_signed
from mmrouter_router.picker.server import PICKER_PORT


@pytest.mark.parametrize("tls", [True, False])
async def test_picker_that_serves_is_healthy_by_the_protocol_that_it_speaks(tls: bool) -> None:
    made = self_signed("vl")
    async with serving((lambda: made) if tls else None) as ip:
        assert await picker_health(ip, PICKER_PORT, SECONDS) == PickerHealth(tls)


@pytest.mark.parametrize("tls", [True, False])
async def test_picker_whose_router_is_not_ready_reports_not_serving(tls: bool) -> None:
    made = self_signed("vl")
    async with serving((lambda: made) if tls else None, ready=False) as ip:
        found = await picker_health(ip, PICKER_PORT, SECONDS)
    assert found == PickerHealth(tls, "reports NOT_SERVING for envoy.service.ext_proc.v3.ExternalProcessor")


async def test_probe_leaves_no_task_behind() -> None:
    # One that the end of the loop cancels prints a traceback among the findings.
    made = self_signed("vl")
    async with serving(lambda: made) as ip:
        await picker_health(ip, PICKER_PORT, SECONDS)
        assert not [task for task in asyncio.all_tasks() if "picker_health.py" in repr(task)]


async def test_closed_port_refuses_connections() -> None:
    assert await picker_health(loopback(), PICKER_PORT, SECONDS) == PickerHealth(None, "refuses connections")


async def test_port_that_ends_every_connection_answers_neither_protocol() -> None:
    # As a forwarded port does whose pod does not listen.
    async def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    ip = loopback()
    async with await asyncio.start_server(end, ip, PICKER_PORT):
        found = await picker_health(ip, PICKER_PORT, SECONDS)
    assert found == PickerHealth(None, "answers neither TLS nor plain HTTP/2")
