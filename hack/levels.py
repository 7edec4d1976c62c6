"""The levels of the test suite: their steps, and how many of them run at the same time."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Step:
    """One command of a level. A step with ``tests`` is a pytest run over these paths, except ``without``.

    ``when``: beside other steps, or alone in the level, before or after all of them.
    """

    name: str
    command: tuple[str, ...] = ()
    tests: str | tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    when: Literal["before", "beside", "after"] = "beside"

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.tests,) if isinstance(self.tests, str) else self.tests


@dataclass(frozen=True)
class Level:
    steps: tuple[Step, ...]
    limit_s: float  # for each step: a hang is a failure that names the step
    lanes: int = 1  # a single level with one lane shows its output as it comes
    lane_gb: float = 0.0  # memory that a step needs


def program(name: str, *arguments: str) -> Step:
    return Step(" ".join((name, *arguments[:1])), (str(BIN / name), *arguments))


def module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)


def files(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/test_{name}.py" for name in names)


UNIT, ROUTER = "tests/unit", "tests/unit/router"
SMALL = (UNIT, "handover/tests")
LARGE = {
    "router": (ROUTER,),
    "operator and renderer": (f"{UNIT}/operator", f"{UNIT}/render"),
    "cli and sidecar": (f"{UNIT}/cli", f"{UNIT}/sidecar"),
}
"""Unit tests by step. Few steps, because each one imports pytest, hypothesis and the product once more."""
CONNECTIONS = (
    f"{ROUTER}/media",
    *files(ROUTER, "server", "control", "pods", "app", "connection", "gateway", "live_page", "renderer_client"),
)
"""Tests that mostly wait for connections."""
RELEASES = files(f"{UNIT}/hack", "python_releases")
TOOLS = (f"{UNIT}/bench", f"{UNIT}/hack")
"""Tests of benchmarks and of hack/, which start many processes and are not needed in the inner loop."""
SLOW_UNIT = (
    *("tests/campaign", f"{UNIT}/campaign", f"{UNIT}/cli/test_bench_run.py"),
    f"{UNIT}/sim/test_capture.py",
    *files(f"{UNIT}/prompt", "captures", "harmony", "mistral", "mistral_images", "segment_cache"),
    *files(ROUTER, "hostile_bodies", "tls", "tracing", "unresolved_images", "offload_comparison", "worker_threads"),
)
"""Unit tests that take seconds each, and are not needed in the inner loop."""
PROCESSES = (
    *files(f"{UNIT}/local", "cluster", "pods"),
    *(f"{UNIT}/{name}/test_process.py" for name in ("kv_events", "router", "sidecar", "sim")),
    *(f"{UNIT}/cli/test_command_line.py", f"{UNIT}/router/test_lazy_app.py"),
    *("handover/tests/shm/test_soak.py", "handover/tests/plugin/test_start.py"),
)
"""Tests that start interpreters, most of whose time is imports, and are not needed in the inner loop."""
LOCAL = "tests/local"
COMMANDS = files(LOCAL, "commands", "installed", "bad_input", "broken_routing")
"""Like most files they share a deployment, which costs 9 s of CPU in each step that has one."""
DISRUPTIVE = files(LOCAL, "failures", "key_rotation", "handover", "renderer", "upgrade")
"""Tests that break deployments of their own; the first two files share one, whose keys differ at the end."""
STAGED = files(LOCAL, "disaggregated", "sglang", "staged_sglang", "janitor", "tracing")
SECURE = files(LOCAL, "engine_tls", "limits", "streams", "tenants", "tls")
CLUSTER = "tests/cluster"
WAITING = files(CLUSTER, "faults", "doctor", "plan", "leadership")
"""Tests that mostly wait: for watches that expire, leases that end, and minutes in which nothing may happen."""
LOADED = files(CLUSTER, "running", "scale", "speed", "upgrade", "rights", "operator_rights")
"""Tests with many resources or with load, most of which have a control plane of their own."""
E2E = "tests/e2e"
# The tour is first, because it installs the release itself.
OWN_NODE = files(E2E, "tour", "vllm", "upgrade", "options", "example", "gateway")
REAL, VLLM, PROCESSORS = "tests/conformance", "tests/conformance/vllm", "tests/conformance/processors"
ROUTED = files(VLLM, "routing", "sliding_window")
FIELDS = files(VLLM, "fields", "renderer", "unknown_families")
DISAGGREGATED = files(VLLM, "encoders", "disaggregated", "leases")
HANDED_OVER = files(VLLM, "handover", "handover_gain", "transfer")
SGLANG_PROMPTS = files(f"{REAL}/sglang", "llava", "prediction", "rendering")
(DEMO,) = files(REAL, "demo")
LONG_FORM = bool(os.environ.get("MMROUTER_FAMILIES"))
HANG_SECONDS = 6 * 3600 if LONG_FORM else 2 * 3600
"""For a step of a large level. A busy machine takes ten times as long as an idle one."""
CELLS = files(REAL, "cells") if LONG_FORM else ()
"""Every setup with each of these families (``tests/conformance/setups.py``); otherwise not collected."""
NATIVE = module("hack.native_wheel", "--optional")
LEVELS = {
    "check": Level(
        (
            # Without Rust only the Python form is tested, and the tests that compare both are skipped.
            Step("compiled form of the library", (*NATIVE, "--install"), when="before"),
            # The longest first, so that all lanes end at about the same time.
            Step("unit tests of connections", tests=CONNECTIONS),
            *(
                Step(f"unit tests of {name}", tests=folders, without=(*CONNECTIONS, *SLOW_UNIT, *PROCESSES))
                for name, folders in LARGE.items()
            ),
            Step(
                "unit tests of other packages",
                tests=SMALL,
                without=(*sum(LARGE.values(), ()), *TOOLS, *SLOW_UNIT, *PROCESSES),
            ),
            program("ruff", "format", "--check", "."),
            program("ruff", "check", "."),
            program("mypy"),
            Step("mypy hack", (str(BIN / "mypy"), "hack")),
            # Engines' interpreters load the hand-over, and some are Python 3.10.
            Step("mypy for Python 3.10", (str(BIN / "mypy"), "--python-version", "3.10", "handover")),
            program("lint-imports"),
            Step("prose, citations and links", module("hack.prose_lint")),
            Step("generated files", module("hack.generate", "--check")),
            Step("licences", module("hack.supply_chain.bill_of_materials", "--check")),
            Step("other Python releases", tests=RELEASES),  # the first time, they install the lock
        ),
        limit_s=900,
        lanes=4,  # on two CPUs: some tests wait more than they compute
    ),
    "local": Level(
        (
            Step("local deployments, commands and broken input", tests=COMMANDS),
            Step("local deployments", tests=LOCAL, without=(*COMMANDS, *DISRUPTIVE, *STAGED, *SECURE)),
            Step("local deployments, security and streams", tests=SECURE),
            Step("local deployments, disruptive", tests=DISRUPTIVE),
            Step("local deployments, staged and traced", tests=STAGED),
            Step("behind a gateway", tests="tests/gateway"),
            Step("benchmarks and tools", tests=TOOLS, without=RELEASES),
            Step("slow unit tests and the campaign's short form", tests=SLOW_UNIT),
            Step("processes", tests=PROCESSES),
            Step("rustfmt and clippy", (*NATIVE, "--lint")),
        ),
        limit_s=HANG_SECONDS,
        lanes=3,
        lane_gb=1.5,
    ),
    # Each step starts a control plane, which costs 12 seconds of CPU and a tenth of one while it runs.
    "cluster": Level(
        (
            Step("build the control plane", (sys.executable, "tests/cluster/prepare.py"), when="before"),
            Step("control plane", tests=CLUSTER, without=(*WAITING, *LOADED)),
            Step("control plane, faults and diagnostics", tests=WAITING),
            Step("control plane, load and versions", tests=LOADED),
            Step("chart", tests="tests/chart"),
        ),
        limit_s=HANG_SECONDS,
        lanes=3,
        lane_gb=3,
    ),
    # Each step with tests has a node of its own. Images and programs are built before, but what the last tests need is
    # built beside the first ones, and vLLM's environment inside a step.
    "e2e": Level(
        (
            Step("build images and a node", (sys.executable, "tests/e2e/prepare.py"), when="before"),
            Step("build gateways", ("nice", sys.executable, "tests/e2e/prepare.py", "gateways")),
            Step("real pods", tests=E2E, without=OWN_NODE),
            Step("real pods on their own nodes", tests=OWN_NODE),
        ),
        limit_s=HANG_SECONDS,
        lanes=1 if os.environ.get("MMROUTER_KUBECONFIG") else 3,  # an external cluster is shared
        lane_gb=5,
    ),
    # The longest first. The steps collect their comparisons in a shared folder.
    "conformance": Level(
        (
            Step("SGLang", tests=f"{REAL}/sglang", without=SGLANG_PROMPTS),
            Step("SGLang, prompts", tests=SGLANG_PROMPTS),
            Step("vLLM, disaggregated", tests=DISAGGREGATED),
            Step("vLLM, per family", tests=VLLM, without=(*ROUTED, *FIELDS, *DISAGGREGATED, *HANDED_OVER)),
            Step("vLLM, image hand-over", tests=HANDED_OVER),
            Step("vLLM behind routers", tests=ROUTED),
            Step("processors", tests=PROCESSORS),
            Step("without a served model", tests=REAL, without=(VLLM, f"{REAL}/sglang", PROCESSORS, *CELLS, DEMO)),
            Step("vLLM, field by field", tests=FIELDS),
            *((Step("every setup with every family", tests=CELLS, when="after"),) if CELLS else ()),
            Step("demo with real engines", tests=DEMO),
        ),
        limit_s=HANG_SECONDS,
        lanes=3,
        lane_gb=6,
    ),
    # Times are printed; only figures that other load does not change fail.
    "bench-quick": Level((Step("quick benchmarks", module("bench.quick", "--counts")),), limit_s=HANG_SECONDS),
}
TOGETHER = ("e2e", "conformance", "cluster", "bench-quick", "local")
"""Levels that run at the same time where several of them are requested: many tests wait more than they compute. The
level with the longest steps is first, so that short steps fill the lanes at the end.
"""
