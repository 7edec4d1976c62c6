"""How a request's images reach engines: in the body, as files of the node, or processed by a renderer."""

from mmrouter_router.handover.delivery import AddressedRequest, BufferedAnswer, BytesDelivery, Delivery, EngineAnswer
from mmrouter_router.handover.handover import Handover, build_handover

__all__ = [
    "AddressedRequest",
    "BufferedAnswer",
    "BytesDelivery",
    "Delivery",
    "EngineAnswer",
    "Handover",
    "build_handover",
]
