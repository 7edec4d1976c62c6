"""A local gateway follows the deployments of this machine by the files that describe them."""

import asyncio
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from waiting import until

from mmrouter_cli.local.folders import network_namespace, run_root
from mmrouter_cli.local.gateway import discover
from mmrouter_router.gateway.metrics import GatewayMetrics
from mmrouter_router.gateway.model_routes import Deployment


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_deployments_stay_while_no_descriptor_is_free_and_go_with_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = run_root() / "demo-1"
    folder.mkdir(parents=True)
    run = {"deployment": "demo", "endpoint": "http://127.0.0.1:8000", "frontends": [], "network": network_namespace()}
    (folder / "run.json").write_text(json.dumps({**run, "control_token": str(folder / "none")}))
    found: list[list[str]] = []
    metrics = GatewayMetrics()

    def value(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(f"mmrouter_gateway_{name}", labels) or 0.0

    def update(deployments: tuple[Deployment, ...]) -> None:
        found.append([each.name for each in deployments])

    monkeypatch.setattr("mmrouter_cli.local.gateway.SECONDS", 0.01)
    task = asyncio.create_task(discover(update, metrics))
    try:
        await until(lambda: found == [["demo"]])
        with no_free_descriptor():
            await until(lambda: value("discovery_errors_total", reason="unreadable") >= 2)
            assert value("discovery_synced") == 0
        await until(lambda: value("discovery_synced") == 1)
        assert found == [["demo"]]
        shutil.rmtree(folder)
        await until(lambda: found == [["demo"], []])
    finally:
        task.cancel()
