"""The encoder pods of a deployment: which of them take images, and how an image is posted to one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.vllm.connectors import embedding_cache_bytes
from mmrouter_lib.engines.vllm.stage_requests import encode_request
from mmrouter_router.encoding.encoder_probes import EncoderProbes
from mmrouter_router.encoding.types import Encoder
from mmrouter_router.fleet.workers import Fleet, Worker, prefer_admitted
from mmrouter_router.handover import AddressedRequest, BufferedAnswer, Delivery
from mmrouter_router.http.upstream import Body, Upstream, UpstreamError
from mmrouter_router.request.engine_request import CHAT, Outgoing, OutgoingImage

MAX_ANSWER = 1 << 20


class EncoderPods:
    """Encoders of the fleet for the image scheduler, by engine start, because a restart empties their caches."""

    def __init__(
        self,
        deployment: MMRouterDeployment,
        fleet: Fleet,
        probes: EncoderProbes,
        upstream: Upstream,
        engine_key: str,
        model: str,
        delivery: Delivery,
    ) -> None:
        self._pools = {pool.name: pool for pool in deployment.spec.pools}
        self._cache_bytes = {
            pool.name: embedding_cache_bytes(deployment, pool)
            for pool in deployment.spec.pools
            if pool.role == "encoder"
        }
        self._admission_seconds = deployment.spec.verification.timeout_seconds
        self._refuses = deployment.spec.verification.on_failure == "Refuse"
        self._fleet, self._probes, self._upstream = fleet, probes, upstream
        self._model, self._delivery = model, delivery
        self._headers = {
            "authorization": f"Bearer {engine_key}",
            "content-type": "application/json",
            "accept-encoding": "identity",
        }

    def encoders(self) -> list[Encoder]:
        """Return the encoders that take images now (docs/architecture.md)."""
        taking = (
            worker
            for worker in self._fleet
            if worker.member.role == "encoder" and worker.member.pool in self._pools and self._takes_images(worker)
        )
        admitted = prefer_admitted(taking, self._fleet.now(), self._admission_seconds)
        return [self._encoder(worker) for worker in admitted]

    def _encoder(self, worker: Worker) -> Encoder:
        pool = self._pools[worker.member.pool]
        encoder = Encoder(_id(worker), pool.accelerator.kind, weight=pool.weight)
        size = self._cache_bytes[pool.name]
        return encoder if size is None else replace(encoder, cache_bytes=size)

    async def post(
        self, encoder: str, image: OutgoingImage, headers: Mapping[str, str], transfers: list[dict[str, Any]]
    ) -> tuple[int, bytes]:
        """Send an image to an encoder; returns status and answer. ``transfers`` gets the image's transfer.

        Raises :class:`UpstreamError`.
        """
        worker = next((worker for worker in self._fleet if _id(worker) == encoder), None)
        if worker is None:
            raise UpstreamError(f"encoder {encoder} has left", sent=False)

        async def post(body: Body) -> BufferedAnswer:
            answer = await self._upstream.request(
                worker.member.ip, HTTP_PORT, "POST", CHAT, {**headers, **self._headers}, body
            )
            try:
                return BufferedAnswer(answer.status, await answer.read(MAX_ANSWER))
            finally:
                answer.close()

        alone = replace(image, message=0, part=0)
        outgoing = Outgoing(CHAT, encode_request([alone.rewrite()], model=self._model), (alone,))
        answer = await self._delivery.send(AddressedRequest(worker, outgoing, outgoing.fields), post, transfers)
        return answer.status, answer.raw

    def _takes_images(self, worker: Worker) -> bool:
        state = self._probes.encoder(worker)
        down = worker.heartbeat is not None and not worker.serving  # the sidecar reports it before the next probe
        return state.routable and not down and not (self._refuses and state.verified != "True")


def _id(worker: Worker) -> str:
    """Return ``<pod name>/<boot id>``, which decisions show to people."""
    return f"{worker.member.name}/{worker.id.rpartition('/')[2]}"
