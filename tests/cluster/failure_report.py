"""What a test that waited in vain tells of a deployment, in few lines: all that is known may be the end of a log."""

import base64
from collections.abc import Mapping
from typing import Any

import httpx
from cluster.controlplane import ControlPlane
from cluster.load import pods
from cluster.resources import MARK, Object, get, status

CONTROL_PORT = 8001
LOG_LINES = 40
LINE = 200
"""Characters of a line that are reported."""
SHORT = {"mmrouter.io/routable": "routable", "mmrouter.io/verified": "verified"}


def describe(plane: ControlPlane, namespace: str, name: str = "demo", operator: str = "operator") -> str:
    """Return its pods, what every frontend says of every engine, its conditions and the end of the operator's log."""
    here = pods(plane, namespace, deployment=name)
    fronts = [pod for pod in here if pod["metadata"]["labels"]["mmrouter.io/role"] == "frontend"]
    conditions = status(plane, namespace, name).get("conditions") or []
    lines = [
        "pods:",
        *(_pod(pod) for pod in here),
        "frontends:",
        *(line for front in fronts for line in _said(front, _token(plane, namespace, name))),
        "conditions:",
        *(f"  {one['type']}={one['status']} {one['reason']}: {one['message']}" for one in conditions),
        f"the last lines of {operator}.log:",
        *(f"  {line}" for line in plane.log_file(operator).read_text().splitlines()[-LOG_LINES:]),
    ]
    return "\n".join(line[:LINE].rstrip() for line in lines)


def _pod(pod: Mapping[str, Any]) -> str:
    metadata, now = pod["metadata"], pod["status"]
    mark = (metadata.get("annotations") or {}).get(MARK, "")
    going = " DELETED" if "deletionTimestamp" in metadata else ""
    conditions = " ".join(
        f"{SHORT.get(one['type'], one['type'])}={one['status']}"
        + ("" if one["status"] == "True" else f"({one.get('reason', '')})")
        for one in now.get("conditions") or []
        if one["type"] in {*SHORT, "Initialized", "ContainersReady", "Ready"}
    )
    containers = " ".join(
        f"{one['name']}:{'ready' if one['ready'] else next(iter(one['state']), '?')}"
        + (f"({one['restartCount']} restarts)" if one["restartCount"] else "")
        for one in (*(now.get("initContainerStatuses") or []), *(now.get("containerStatuses") or []))
    )
    return f"  {metadata['name']} mark {mark}{going} {now.get('phase', '')} {conditions} | {containers}"


def _said(front: Mapping[str, Any], token: str) -> list[str]:
    name = front["metadata"]["name"]
    try:
        url = f"http://{front['status'].get('podIP', '')}:{CONTROL_PORT}/control/state"
        answer = httpx.get(url, headers={"authorization": f"Bearer {token}"}, timeout=5, trust_env=False)
        state = answer.raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return [f"  {name}: {error!r}"]
    return [f"  {name}: ready {state['ready']}", *(f"    {_engine(one)}" for one in state["workers"])]


def _engine(one: Mapping[str, Any]) -> str:
    return (
        f"{one['name']} {one['standing']}, routable {one['routable']}, verified {one.get('verified')},"
        f" admitted {one['admitted']}, synced {one['synced']} at {one['seq']}, heard {one['heard_seconds_ago']} s ago,"
        f" engine {one['engine_state']}, {one['in_flight']} in flight {one.get('cause', '')} {one.get('message', '')}"
    )


def _token(plane: ControlPlane, namespace: str, name: str) -> str:
    found: Object | None = get(plane, "Secret", namespace, f"{name}-secrets")
    return base64.b64decode(found["data"]["control.token"]).decode() if found else ""
