"""The kit of ``tests/gateway/epp`` against a picker of another project: the inference extension's own, of its last
release that has one. It follows the pods of an API server; no node runs them.
"""

import os
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from artefacts import Record, go_programs
from cluster.conftest import ROOT
from cluster.controlplane import ControlPlane, end
from cluster.deployments import MERGE, served
from waiting import wait_for

pytestmark = pytest.mark.long_form
PODS = ("10.255.0.1", "10.255.0.2", "10.255.0.3")
PORT = 8000
API = "inference.networking.k8s.io/v1"
LABELS = {"app": "engine"}
READY = [{"type": "Ready", "status": "True"}]
IN_PLACE = "a message out of place is ignored, or answered as if it were in its place"
FAILED = {
    "test_subset_hint_is_obeyed[False]": "a hint that is a text is ignored",
    "test_subset_without_an_engine_is_answered_503[hint2]": "a hint that is an empty text is ignored",
    "test_selection_header_of_conformance_tests_is_obeyed": "only with a plugin that refuses requests without it",
    "test_answer_passes_as_it_arrives": "an answer that is no stream of events is held until its end",
    "test_trailers_of_both_directions_are_answered": "trailers of a request are ignored, and its body has no end then",
    "test_health_services_are_known[liveness]": "its health has a port of its own",
    "test_health_services_are_known[readiness]": "its health has a port of its own",
    "test_no_sequence_breaks_the_order_or_the_next_request": "an engine's headers are answered before the request",
    **{
        f"test_message_out_of_place_ends_the_stream_with_invalid_argument[{place}]": IN_PLACE
        for place in (
            *("body first", "answer first", "trailers first"),
            *("headers twice", "answer before the end", "answer's body"),
        )
    },
}
"""Tests of the kit that this picker fails -> what it does instead."""


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("", 0))
    numbers = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return numbers


@pytest.fixture
def picker(cluster: ControlPlane, namespace: str) -> Iterator[str]:
    """The address of a picker for a pool of pods that exist in the API server only."""
    (file,) = go_programs("definitions").glob("*_inferencepools.yaml")
    with served(cluster, yaml.safe_load(file.read_text())):
        yield from picking(cluster, namespace)


def picking(cluster: ControlPlane, namespace: str) -> Iterator[str]:
    core = f"/api/v1/namespaces/{namespace}"
    pods, account = f"{core}/pods", f"{core}/serviceaccounts/default"
    wait_for(lambda: cluster.request("GET", account).is_success, 10, "the namespace has its account")
    for number, ip in enumerate(PODS):
        metadata = {"name": f"engine-{number}", "labels": LABELS}
        spec = {"schedulerName": "none", "containers": [{"name": "engine", "image": "none"}]}
        cluster.request("POST", pods, {"metadata": metadata, "spec": spec}).raise_for_status()
        status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": READY}
        cluster.request("PATCH", f"{pods}/engine-{number}/status", {"status": status}, MERGE).raise_for_status()
    pool = {"apiVersion": API, "kind": "InferencePool", "metadata": {"name": "engines"}}
    reference = {"name": "none", "port": {"number": 9002}}
    pool["spec"] = {
        "selector": {"matchLabels": LABELS},
        "targetPorts": [{"number": PORT}],
        "endpointPickerRef": reference,
    }
    cluster.request("POST", f"/apis/{API}/namespaces/{namespace}/inferencepools", pool).raise_for_status()
    own, health, metrics = free_ports(3)
    argv = [
        *(go_programs("picker") / "epp", "--pool-name=engines", f"--pool-namespace={namespace}"),
        *("--secure-serving=false", "--health-checking"),
        *(f"--grpc-port={own}", f"--grpc-health-port={health}", f"--metrics-port={metrics}"),
    ]
    process = cluster.spawn("picker", argv, {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)})

    def known() -> str:
        return cluster.log_file("picker").read_text()[-4000:]

    def listens() -> bool:
        assert process.poll() is None, known()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", own)) == 0

    try:
        wait_for(listens, 30, "the picker listens", known=known)
        yield f"127.0.0.1:{own}"
    finally:
        end(process)


def test_the_kit_finds_what_another_picker_does_otherwise(picker: str, tmp_path: Path, record: Record) -> None:
    report = tmp_path / "report.xml"
    env = {
        **os.environ,
        "MMROUTER_EPP": picker,
        "MMROUTER_EPP_ENDPOINTS": ",".join(f"{ip}:{PORT}" for ip in PODS),
        "MMROUTER_EPP_MODEL": "m",
    }
    files = [ROOT / "tests" / "gateway" / "epp" / name for name in ("test_protocol.py", "test_mutations.py")]
    command = [sys.executable, "-m", "pytest", "-q", *files, f"--junitxml={report}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    cases = ET.parse(report).iter("testcase")
    outcomes = {case.get("name", ""): next((child.tag for child in case), "passed") for case in cases}
    record("tests of the kit that the inference extension's picker passes and fails", Counter(outcomes.values()))
    assert {name for name, outcome in outcomes.items() if outcome in ("failure", "error")} == FAILED.keys(), done.stdout
    assert list(outcomes.values()).count("passed") >= len(FAILED)
