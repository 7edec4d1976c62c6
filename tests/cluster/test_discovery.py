"""A router's view of its deployment's pods, from a real API server under the least role that works."""

import asyncio
import time
from asyncio import to_thread
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cluster.controlplane import API_PORT, ControlPlane
from cluster.deployments import MERGE
from cluster.resources import make_account
from waiting import until, wait_for

from mmrouter_router.core.settings import ApiServer
from mmrouter_router.fleet.membership import Membership, watch_pods
from mmrouter_router.telemetry.metrics import Metrics

ACCOUNT = "frontend"
OWN = "demo-frontend-0"
NODE = "n1"


class World:
    """One namespace with a ServiceAccount that may read pods, and the pods that tests put there. There is no kubelet:
    what it would say in a pod's status, the test says.
    """

    def __init__(self, cluster: ControlPlane, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self.server = ApiServer(cluster.address, str(API_PORT), folder)
        self._folder = folder
        watches = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
        make_account(self.cluster, self.namespace, ACCOUNT, watches)
        self._folder.mkdir()
        (self._folder / "ca.crt").write_bytes(self.cluster.ca.read_bytes())
        (self._folder / "namespace").write_text(self.namespace)
        self.token(self.cluster.token(self.namespace, ACCOUNT))

    def token(self, text: str) -> None:
        (self._folder / "token").write_text(text)

    def pod(self, name: str, role: str = "worker", deployment: str = "demo", **status) -> str:
        labels = {"mmrouter.io/deployment": deployment, "mmrouter.io/role": role}
        if role != "frontend":
            labels["mmrouter.io/pool"] = role
        spec = {
            "nodeName": NODE,
            "serviceAccountName": ACCOUNT,
            "containers": [{"name": "engine", "image": "none"}],
            "initContainers": [{"name": "sidecar", "image": "none", "restartPolicy": "Always"}],
        }
        made = self.cluster.request("POST", self.pods, {"metadata": {"name": name, "labels": labels}, "spec": spec})
        made.raise_for_status()
        if status:
            self.status(name, **status)
        return str(made.json()["metadata"]["uid"])

    def status(self, name: str, **status) -> None:
        self.cluster.request("PATCH", f"{self.pods}/{name}/status", {"status": status}, MERGE).raise_for_status()

    def delete(self, name: str, grace: int) -> None:
        self.cluster.request("DELETE", f"{self.pods}/{name}", gracePeriodSeconds=str(grace)).raise_for_status()


class Watch:
    def __init__(self, world: World, own_uid: str = "") -> None:
        self.told: list[Membership] = []
        self.metrics = Metrics()
        self._run = watch_pods(world.server, "demo", own_uid, self.told.append, self.metrics)

    @property
    def now(self) -> Membership:
        return self.told[-1]

    def names(self) -> list[str]:
        return [member.name for member in self.now.members] if self.told else []

    def errors(self, reason: str) -> float:
        return self.metrics.registry.get_sample_value("mmrouter_discovery_errors_total", {"reason": reason}) or 0.0

    @asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self._run)
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def world(cluster: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[World]:
    """The node exists, because the control plane deletes pods of unknown nodes after 40 s."""
    cluster.request("POST", "/api/v1/nodes", {"metadata": {"name": NODE}}).raise_for_status()
    yield World(cluster, namespace, tmp_path / "serviceaccount")
    cluster.request("DELETE", f"/api/v1/nodes/{NODE}").raise_for_status()


async def test_pods_come_change_and_go(world: World) -> None:
    uid = await to_thread(world.pod, "w0", podIP="10.0.0.1", phase="Running")
    await to_thread(world.pod, "other", deployment="other", podIP="10.0.0.9", phase="Running")
    async with Watch(world).running() as watch:
        await until(lambda: watch.names() == ["w0"])
        member = watch.now.members[0]
        facts = (member.uid, member.ip, member.pool, member.node, member.ready)
        assert facts == (uid, "10.0.0.1", "worker", NODE, False)

        started = {"name": "sidecar", "started": True, "ready": True, "image": "", "imageID": "", "restartCount": 0}
        await to_thread(world.status, "w0", initContainerStatuses=[started])
        await until(lambda: watch.now.members[0].ready)

        await to_thread(world.pod, "w1")
        await to_thread(world.status, "w1", podIP="10.0.0.2", phase="Running")
        await until(lambda: watch.names() == ["w0", "w1"])

        await to_thread(world.delete, "w0", 30)
        await until(lambda: watch.now.members[0].draining)
        assert watch.names() == ["w0", "w1"]
        await to_thread(world.delete, "w0", 0)
        await until(lambda: watch.names() == ["w1"])

        await to_thread(world.status, "w1", phase="Failed")
        await until(lambda: watch.names() == [])
        assert watch.metrics.registry.get_sample_value("mmrouter_discovery_synced") == 1


async def test_peers_are_the_other_frontends_and_the_own_pods_end_is_reported(world: World) -> None:
    own = await to_thread(world.pod, OWN, "frontend", podIP="10.0.1.1", phase="Running")
    await to_thread(world.pod, "demo-frontend-1", "frontend", podIP="10.0.1.2", phase="Running")
    async with Watch(world, own).running() as watch:
        await until(lambda: watch.told)
        assert [peer.name for peer in watch.now.peers] == ["demo-frontend-1"]
        assert not watch.now.leaving
        await to_thread(world.delete, OWN, 30)
        await until(lambda: watch.now.leaving)


async def test_no_pod_is_dropped_while_the_api_server_restarts_and_changes_follow(world: World) -> None:
    await to_thread(world.pod, "w0", podIP="10.0.0.1", phase="Running")
    async with Watch(world).running() as watch:
        await until(lambda: watch.names() == ["w0"])
        await to_thread(world.cluster.stop, "apiserver")
        await until(lambda: watch.errors("unreachable") >= 2)
        assert watch.metrics.registry.get_sample_value("mmrouter_discovery_synced") == 0
        await to_thread(world.cluster.start, "apiserver")
        await to_thread(world.pod, "w1", podIP="10.0.0.2", phase="Running")
        await until(lambda: watch.names() == ["w0", "w1"])
        assert all("w0" in [member.name for member in roster.members] for roster in watch.told)


async def test_a_version_that_the_server_has_forgotten_begins_with_a_new_list(world: World) -> None:
    await to_thread(world.pod, "w0", podIP="10.0.0.1", phase="Running")
    async with Watch(world).running() as watch:
        await until(lambda: watch.names() == ["w0"])
        # The server's memory begins with its start, and something was written after the last event of this watch.
        other = f"/api/v1/namespaces/{world.namespace}/configmaps"
        (await to_thread(world.cluster.request, "POST", other, {"metadata": {"name": "c"}})).raise_for_status()
        await to_thread(world.cluster.restart_apiserver)
        await until(lambda: watch.errors("expired"))
        await to_thread(world.delete, "w0", 0)
        await until(lambda: watch.names() == [])


async def test_a_token_is_read_again_and_a_wrong_one_drops_no_pod(world: World) -> None:
    await to_thread(world.pod, "w0", podIP="10.0.0.1", phase="Running")
    good = (world.server.folder / "token").read_text()
    world.token("not.a.token")
    async with Watch(world).running() as watch:
        await until(lambda: watch.errors("unauthorized") >= 2)
        assert watch.told == []
        world.token(good)
        await until(lambda: watch.names() == ["w0"])


async def test_without_the_role_nothing_is_known_and_the_reason_is_counted(world: World) -> None:
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{world.namespace}/rolebindings/{ACCOUNT}"
    await to_thread(world.cluster.request, "DELETE", rbac)
    async with Watch(world).running() as watch:
        await until(lambda: watch.errors("forbidden") >= 2)
        assert watch.told == []


async def test_an_idle_deployment_costs_one_list_and_one_watch(world: World) -> None:
    began = time.time()
    await to_thread(world.pod, "w0", podIP="10.0.0.1", phase="Running")
    async with Watch(world).running() as watch:
        await until(lambda: watch.names() == ["w0"])
        await asyncio.sleep(2)
        assert len(watch.told) == 1
    user = f"system:serviceaccount:{world.namespace}:{ACCOUNT}"

    def asked() -> list[tuple[str, str]]:
        rows = (row for row in world.cluster.audit(began) if row.user == user)
        # A watch has a line at its beginning and one at its end.
        return sorted((row.verb, row.resource) for row in rows if row.stage == "ResponseStarted" or row.verb != "watch")

    wait_for(lambda: len(asked()) >= 2, 10, "list and watch are in the audit log")
    assert asked() == [("list", "pods"), ("watch", "pods")]
