"""Envoy Gateway as a process, which reads its resources from a file and runs Envoy beside itself.

It has no InferencePool. Two of its own policies, which docs/gateway.md has, make a route ask a picker.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from doc_commands import on_gateway_page
from waiting import answers_ok, wait_for

from mmrouter_cli.local.envoy import PICKER_PORT

OWN, GATEWAY_API = "gateway.envoyproxy.io/v1alpha1", "gateway.networking.k8s.io/v1"
CONTROLLER = "gateway.envoyproxy.io/gatewayclass-controller"
ENVOY = "1.40.0"
ENGINE_PORT = 8000
ROUTE = "demo"
START_SECONDS = 60


def settings(folder: Path) -> dict[str, Any]:
    """Return the program's own configuration. ``folder``: what it reads and keeps is below."""
    homes = {name: str(folder / name) for name in ("configHome", "dataHome", "stateHome", "runtimeDir")}
    resource = {"type": "File", "file": {"paths": [str(folder / "resources")]}}
    return {
        **{"apiVersion": OWN, "kind": "EnvoyGateway", "gateway": {"controllerName": CONTROLLER}},
        "provider": {
            "type": "Custom",
            "custom": {"resource": resource, "infrastructure": {"type": "Host", "host": homes}},
        },
        "extensionApis": {"enableBackend": True},
    }


def resources(port: int, pickers: Sequence[str], engines: Sequence[str]) -> list[dict[str, Any]]:
    """Return the Gateway, its route to the engines, and the policies. ``pickers``, ``engines``: their addresses."""

    def made(api: str, kind: str, name: str, **spec: Any) -> dict[str, Any]:
        return {"apiVersion": api, "kind": kind, "metadata": {"name": name}, "spec": spec}

    def backend(name: str, hosts: Sequence[str], number: int, **more: Any) -> dict[str, Any]:
        return made(OWN, "Backend", name, endpoints=[{"ip": {"address": ip, "port": number}} for ip in hosts], **more)

    def reference(name: str) -> dict[str, str]:
        return {"group": OWN.partition("/")[0], "kind": "Backend", "name": name}

    asking, chosen = yaml.safe_load_all(on_gateway_page("EnvoyExtensionPolicy", NAME=ROUTE))
    asking["spec"]["extProc"][0]["backendRefs"] = [reference("pickers")]  # for a Service, which a file cannot have
    parameters = {"group": OWN.partition("/")[0], "kind": "EnvoyProxy", "name": "own"}
    return [
        made(OWN, "EnvoyProxy", "own", provider={"type": "Host", "host": {"envoyVersion": ENVOY}}),
        made(GATEWAY_API, "GatewayClass", "own", controllerName=CONTROLLER),
        made(
            *(GATEWAY_API, "Gateway", "public"),
            gatewayClassName="own",
            infrastructure={"parametersRef": parameters},
            listeners=[{"name": "http", "protocol": "HTTP", "port": port}],
        ),
        backend("engines", engines, ENGINE_PORT),
        backend("pickers", pickers, PICKER_PORT, tls={"insecureSkipVerify": True}),
        made(
            *(GATEWAY_API, "HTTPRoute", ROUTE),
            parentRefs=[{"name": "public"}],
            rules=[{"backendRefs": [reference("engines")], "timeouts": {"request": "0s"}}],
        ),
        asking,
        chosen,
    ]


@contextmanager
def envoy_gateway(
    program: Path, envoy: str, folder: Path, port: int, pickers: Sequence[str], engines: Sequence[str]
) -> Iterator[str]:
    """Run Envoy Gateway until the block ends, and return the URL of its Gateway."""
    kept = folder / "dataHome" / "envoy-versions" / ENVOY / "bin"
    kept.mkdir(parents=True)
    (kept / "envoy").symlink_to(envoy)
    (folder / "resources").mkdir()
    (folder / "resources" / "all.yaml").write_text(yaml.safe_dump_all(resources(port, pickers, engines)))
    (folder / "settings.json").write_text(json.dumps(settings(folder)))
    log = folder / "log"
    made = subprocess.run(
        [program, "certgen", "--local", "--config-home", folder / "configHome"], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    with log.open("wb") as out:
        argv = [program, "server", "--config-path", folder / "settings.json"]
        process = subprocess.Popen(argv, stdout=out, stderr=out, env={**os.environ, "HOME": str(folder)})
    url = f"http://127.0.0.1:{port}"

    def serves() -> bool:
        assert process.poll() is None, log.read_text()[-6000:]
        return answers_ok(f"{url}/v1/models")

    try:
        wait_for(serves, START_SECONDS, "the Gateway serves", known=lambda: log.read_text()[-6000:])
        yield url
    finally:
        process.terminate()
        process.wait(60)
