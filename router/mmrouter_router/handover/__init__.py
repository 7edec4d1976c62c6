"""How a request's images reach engines: in the body, as files of the node, or processed by a renderer."""

from mmrouter_router.handover.builder import handover_of
from mmrouter_router.handover.delivery import Answered, ByBytes, Delivery, Parcel, Said
from mmrouter_router.handover.handover import HandOver

__all__ = ["Answered", "ByBytes", "Delivery", "HandOver", "Parcel", "Said", "handover_of"]
