"""The picker of the inference extension's conformance suite: the router's own, for the pods of any pool.

    python suite_picker.py --pool-name NAME --pool-namespace NAMESPACE

Runs in a pod in the place of the suite's picker, with its arguments. Pods are found in place of frontends. Answers name
the endpoint that the gateway reports, which the suite wants to see in a header.
"""

import argparse
import asyncio
import json
import ssl
import urllib.request
from pathlib import Path
from typing import Any

import grpc.aio

from mmrouter_router.http.server import Shutdown
from mmrouter_router.picker import protocol
from mmrouter_router.picker.frontend_choice import FrontendChoice
from mmrouter_router.picker.server import Picker
from mmrouter_router.picker.wire import HEALTH_SERVICE, SERVING, HealthCheckRequest, HealthCheckResponse

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API = "https://kubernetes.default.svc"
SERVED = "x-conformance-test-served-endpoint"
PAUSE_SECONDS = 0.5


def read(path: str) -> Any:
    request = urllib.request.Request(API + path, headers={"authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"})
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=10, context=context) as answer:
        return json.load(answer)


def addresses(namespace: str, labels: dict[str, str]) -> list[str]:
    selector = ",".join(f"{name}%3D{value}" for name, value in labels.items())
    pods = read(f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}")["items"]
    return [pod["status"]["podIP"] for pod in pods if "podIP" in pod["status"]]


class Reporting:
    """A stream whose answers name the endpoint that the gateway reports."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._served = stream, ""

    async def read(self) -> Any:
        message = await self._stream.read()
        if message is not None and message.WhichOneof("kind") == "response_headers":
            self._served = protocol.served(message)
        return message

    async def write(self, answer: Any) -> None:
        if self._served and answer.WhichOneof("kind") == "response_headers":
            protocol.mutate(answer.response_headers.response.header_mutation, [(SERVED, self._served)], ())
        await self._stream.write(answer)

    def cancelled(self) -> bool:
        return bool(self._stream.cancelled())


async def serve_health(port: int) -> None:
    """Serve the health of the suite's own service, which its probes ask for."""

    async def check(request: Any, context: Any) -> Any:
        return HealthCheckResponse(status=SERVING)

    handler = grpc.unary_unary_rpc_method_handler(
        check,
        request_deserializer=HealthCheckRequest.FromString,
        response_serializer=lambda answer: answer.SerializeToString(),
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(HEALTH_SERVICE, {"Check": handler}),))
    server.add_insecure_port(f"0.0.0.0:{port}")
    await server.start()
    await server.wait_for_termination()


async def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (("pool-name", str), ("pool-namespace", str), ("grpc-port", int), ("grpc-health-port", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    options, _ = parser.parse_known_args()
    pools = f"/apis/inference.networking.k8s.io/v1/namespaces/{options.pool_namespace}/inferencepools"
    spec = read(f"{pools}/{options.pool_name}")["spec"]
    found: list[str] = []
    choose = FrontendChoice(lambda: found, spec["targetPorts"][0]["number"], test_selection=True)
    picker = Picker(
        lambda stream, first: choose(Reporting(stream), first),
        Shutdown(),
        lambda: bool(found),
        host="0.0.0.0",
        port=options.grpc_port,
    )

    async def follow() -> None:
        while True:
            found[:] = await asyncio.to_thread(addresses, options.pool_namespace, spec["selector"]["matchLabels"])
            await asyncio.sleep(PAUSE_SECONDS)

    await asyncio.gather(picker.serve(0), serve_health(options.grpc_health_port), follow())


if __name__ == "__main__":
    asyncio.run(main())
