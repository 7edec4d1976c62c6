"""Probes and shutdown of the containers. Pure.

How an engine pod ends: the kubelet runs the engine's ``preStop`` hook at once, and stops the native sidecar only after
the engine has ended, so a hook of the sidecar's own would come too late. The engine's hook therefore asks the sidecar,
on the pod's loopback, to say "draining" to every router, and waits until they have heard it. Only then SIGTERM follows,
after which engines let requests finish and refuse new ones (docs/engine-facts/vllm.md#drain, on SGLang 6). Routers
also see the pod's
``deletionTimestamp``; the sidecar's word reaches them where there is none, as when a node shuts down.
"""

from typing import Any

from mmrouter_lib.engines.base.launch import Launch
from mmrouter_operator.render.pod.parts import probe

NOTICE_SECONDS = 5
"""How long before SIGTERM a pod is announced as leaving: Services and routers stop sending to it meanwhile."""
STOP_SECONDS = 30
"""Time to stop once the requests are done."""
STARTUP_SECONDS = 300
"""How long router and sidecar may take to open their sockets.

They take seconds, and many where engines that start leave a node no CPU: to begin anew would only make that worse.
"""
DRAIN_PORT = 8002
"""The sidecar's hook, on the pod's loopback."""

# Engine images hold Python and need hold no HTTP client. The wait does not depend on the answer.
ASK_SIDECAR = f"""\
import os, sys, time, urllib.request
try:
    urllib.request.urlopen(f"http://{{os.environ['POD_LOOPBACK']}}:{DRAIN_PORT}/drain", timeout=2).read()
except OSError as error:
    print(f"drain: {{error}}", file=sys.stderr)
finally:
    time.sleep(float(sys.argv[1]))
"""


def engine_probes(launch: Launch, startup_seconds: int) -> dict[str, Any]:
    """Return an engine's probes. Liveness is patient: a restart costs the cache and minutes of loading."""
    path, timeout = launch.health_path, launch.health_seconds
    period = max(5, timeout)
    return {
        "startupProbe": probe(path, "http", period=period, failures=-(-startup_seconds // period), timeout=timeout),
        "readinessProbe": probe(path, "http", period=period, failures=3, timeout=timeout),
        "livenessProbe": probe(path, "http", period=max(20, timeout), failures=15, timeout=max(10, timeout)),
    }


def our_probes(readiness_period: int) -> dict[str, Any]:
    """Return the probes of router and sidecar. Started means that sockets are open, not that the engine is up."""
    return {
        "startupProbe": probe("/healthz", "metrics", period=1, failures=STARTUP_SECONDS),
        "readinessProbe": probe("/readyz", "metrics", period=readiness_period, failures=2),
        "livenessProbe": probe("/healthz", "metrics", period=10, failures=6),
    }


def announce_by_sidecar() -> dict[str, Any]:
    """Return the lifecycle of an engine that has a sidecar."""
    return {"preStop": {"exec": {"command": ["python3", "-c", ASK_SIDECAR, str(NOTICE_SECONDS)]}}}


def announce_by_waiting() -> dict[str, Any]:
    """Return the lifecycle of a container that others find by the API: it serves on while they learn that it goes."""
    return {"preStop": {"sleep": {"seconds": NOTICE_SECONDS}}}
