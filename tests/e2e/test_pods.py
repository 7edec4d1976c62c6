"""A deployment in real pods: exact from outside and inside, in the ten scenarios, and with only what it needs."""

import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from artefacts import Record
from cluster.access import Access
from cluster.resources import get
from e2e.deploying import RESTRICTED, Deployed
from e2e.endpoints import CONTROL_PORT, address, reached
from e2e.staged_deployments import Chain, chained
from scenarios import SCENARIOS, Chat, Scenario, title

from mmrouter_lib.api import quantity_bytes
from mmrouter_operator.model.kinds import RESOURCE
from mmrouter_operator.render.pod.pod_security_violations import violations

SIDECAR_MIB = 60
CONTAINER = """\
import json, os
told = dict(line.split(":", 1) for line in open("/proc/self/status"))
found = {name: told[name].split()[0] for name in ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp", "Uid", "Gid")}
try:
    os.mkdir("/written")
except OSError as error:
    found["root"] = error.strerror
found["token"] = str(os.path.exists("/var/run/secrets/kubernetes.io/serviceaccount/token"))
print(json.dumps(found))
"""
NOTHING = "0" * 16
RESTRAINED = {
    **dict.fromkeys(("CapEff", "CapPrm", "CapBnd"), NOTHING),
    "NoNewPrivs": "1",  # no privilege escalation
    "Seccomp": "2",  # a filter
    **dict.fromkeys(("Uid", "Gid"), "65532"),
    "root": "Read-only file system",
}
"""What :data:`CONTAINER` finds out about the process that it runs in."""
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "tcc", "rustc", "go", "make", "ninja", "cmake")
# The shell looks at the first name only that it is given.
COMMANDS = 'for name; do if command -v "$name" >/dev/null; then echo "$name"; fi; done'
SHARED = """\
import os, sys
print(open(sys.argv[1]).read().strip())
print(next(row.split()[2] for row in open("/proc/mounts") if row.split()[1] == "/dev/shm"))
told = os.statvfs("/dev/shm")
print(told.f_frsize * told.f_blocks)
os.remove(sys.argv[1])
"""


def test_verify_is_green_from_outside_the_cluster(deployed: Deployed) -> None:
    with reached(deployed) as where:
        done = where.mmrouter("verify")
    assert done.returncode == 0, done.stdout + done.stderr


def test_verify_is_green_from_inside_by_the_services_name(deployed: Deployed) -> None:
    pod = deployed.pods("frontend")[0]
    url = f"http://{deployed.name}.{deployed.namespace}.svc"
    options = (f"--control=http://{address(pod)}:{CONTROL_PORT}", f"--token={deployed.token()}")
    done = deployed.execute(pod["metadata"]["name"], "router", "mmrouter", "verify", url, *options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def inside(deployed: Deployed) -> dict[tuple[str, str], dict[str, str]]:
    """What every container of every pod finds out about itself: (pod, container) -> :data:`CONTAINER`'s words."""
    found = {}
    for pod in [*deployed.pods("frontend"), *deployed.pods("worker")]:
        for container in containers(pod):
            where = (pod["metadata"]["name"], container["name"])
            done = deployed.execute(*where, "python3", "-c", CONTAINER)
            assert done.returncode == 0, done.stderr
            found[where] = json.loads(done.stdout)
    assert len(found) == 6
    return found


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]]


def test_every_container_is_restricted_by_its_spec_and_by_its_kernel(
    deployed: Deployed, inside: dict[tuple[str, str], dict[str, str]]
) -> None:
    for pod in [*deployed.pods("frontend"), *deployed.pods("worker")]:
        assert list(violations(pod["spec"])) == []
        for container in containers(pod):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            facts = inside[pod["metadata"]["name"], container["name"]]
            assert {name: facts[name] for name in RESTRAINED} == RESTRAINED


def test_only_a_frontend_holds_a_token_of_the_api_server(inside: dict[tuple[str, str], dict[str, str]]) -> None:
    holding = {container for (_, container), facts in inside.items() if facts["token"] == "True"}
    without = {container for (_, container), facts in inside.items() if facts["token"] == "False"}
    assert (holding, without) == ({"router"}, {"engine", "sidecar"})


def test_engine_and_sidecar_share_a_shared_memory_of_the_pools_size(deployed: Deployed) -> None:
    resource = get(deployed.cluster, RESOURCE, deployed.namespace, deployed.name)
    (pool,) = resource["spec"]["pools"]
    for pod in deployed.pods("worker"):
        name, word = pod["metadata"]["name"], secrets.token_hex(8)
        node = deployed.cluster.read(f"/api/v1/nodes/{pod['spec']['nodeName']}")
        # No memory-backed volume is larger than the memory that its node gives to pods.
        most = int(quantity_bytes(node["status"]["allocatable"]["memory"]))
        size = min(int(quantity_bytes(pool["sharedMemory"]["size"])), most)
        for writer, reader in (("engine", "sidecar"), ("sidecar", "engine")):
            file = f"/dev/shm/{writer}-{word}"
            assert deployed.execute(name, writer, "sh", "-c", f"echo {word} >{file}").returncode == 0
            seen = deployed.execute(name, reader, "python3", "-c", SHARED, file)
            assert seen.returncode == 0, seen.stderr
            assert seen.stdout.split() == [word, "tmpfs", str(size)]


def test_an_idle_sidecar_is_small(deployed: Deployed, record: Record) -> None:
    pod = deployed.pods("worker")[0]["metadata"]["name"]
    # The container's first process is the sidecar itself.
    status = deployed.execute(pod, "sidecar", "cat", "/proc/1/status").stdout
    lines = dict(line.split(":", 1) for line in status.splitlines())
    assert lines["Name"].strip() == "mmrouter"
    mib = int(lines["VmRSS"].split()[0]) / 1024
    record("sidecar, MiB resident", round(mib, 1))
    assert mib < SIDECAR_MIB


def test_the_images_hold_no_compiler(deployed: Deployed) -> None:
    for role, container in (("frontend", "router"), ("worker", "engine")):
        pod = deployed.pods(role)[0]["metadata"]["name"]
        done = deployed.execute(pod, container, "sh", "-c", COMMANDS, "sh", *COMPILERS, "sh")
        assert done.returncode == 0, done.stderr
        # The shell is there and comes last: what stands before it would have been found as well.
        assert done.stdout.split() == ["sh"]


@pytest.fixture(scope="module")
def fetching(operated: Access) -> Iterator[Chain]:
    """The deployment of ``examples/kind.yaml``, allowed to fetch from a pod beside it."""
    two = {"frontend": {"replicas": 2}}
    with operated.namespace(**RESTRICTED) as namespace, chained(operated, namespace, two) as made:
        yield made


@pytest.fixture
def chat(fetching: Chain) -> Iterator[Chat]:
    with fetching.chat() as made:
        yield made


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, chat: Chat, fetching: Chain) -> None:
    scenario(chat, fetching.web)
