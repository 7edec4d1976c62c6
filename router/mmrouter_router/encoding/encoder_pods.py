"""The encoder pods of a deployment: who of them takes images, and how one is sent a request."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmrouter_lib.api import MMRouterDeployment, Pool
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.vllm.connectors import embedding_cache_bytes
from mmrouter_lib.engines.vllm.disaggregation import encode_request
from mmrouter_router.encoding import Encoder
from mmrouter_router.encoding.encoder_probes import Probes
from mmrouter_router.fleet.admission import preferred
from mmrouter_router.fleet.workers import Fleet, Worker
from mmrouter_router.handover import Delivery, Parcel, Said
from mmrouter_router.http.upstream import Body, Upstream, UpstreamError
from mmrouter_router.request.engine_request import CHAT, Outgoing, OutgoingImage

MAX_ANSWER = 1 << 20


class EncoderPods:
    """What the scheduler of images knows of the fleet. An encoder is known by its engine's start: then it is empty."""

    def __init__(
        self,
        deployment: MMRouterDeployment,
        fleet: Fleet,
        probes: Probes,
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
        self._patience = deployment.spec.verification.timeout_seconds
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
            if worker.member.role == "encoder" and worker.member.pool in self._pools and self._takes(worker)
        )
        let_in = preferred(taking, self._fleet.now(), self._patience)
        return [self._encoder(worker, self._pools[worker.member.pool]) for worker in let_in]

    def _encoder(self, worker: Worker, pool: Pool) -> Encoder:
        encoder = Encoder(_id(worker), pool.accelerator.kind, weight=pool.weight)
        size = self._cache_bytes[pool.name]
        return encoder if size is None else replace(encoder, cache_bytes=size)

    async def post(
        self, encoder: str, image: OutgoingImage, headers: Mapping[str, str], told: list[dict[str, Any]]
    ) -> tuple[int, bytes]:
        """Send an encoder an image; returns status and answer. ``told`` gets how it travelled.

        Raises :class:`UpstreamError`.
        """
        worker = next((worker for worker in self._fleet if _id(worker) == encoder), None)
        if worker is None:
            raise UpstreamError(f"encoder {encoder} has left", sent=False)

        async def post(body: Body) -> Said:
            answer = await self._upstream.request(
                worker.member.ip, HTTP_PORT, "POST", CHAT, {**headers, **self._headers}, body
            )
            try:
                return Said(answer.status, await answer.read(MAX_ANSWER))
            finally:
                answer.close()

        alone = replace(image, message=0, part=0)
        outgoing = Outgoing(CHAT, encode_request([alone.rewrite()], model=self._model), (alone,))
        said = await self._delivery.send(Parcel(worker, outgoing, outgoing.fields), post, told)
        return said.status, said.raw

    def _takes(self, worker: Worker) -> bool:
        standing = self._probes.encoder(worker)
        down = worker.beat is not None and not worker.serving  # its sidecar knows sooner than the next probe
        return standing.routable and not down and not (self._refuses and standing.verified != "True")


def _id(worker: Worker) -> str:
    """Return ``<pod name>/<boot id>``: people read it in decisions."""
    return f"{worker.member.name}/{worker.id.rpartition('/')[2]}"
