"""Processor options of a request (``mm_processor_kwargs``): those that are modelled, and how vLLM names images then."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from mmrouter_lib.engines import answering_args
from mmrouter_lib.engines.vllm.item_names import name_with_options, trusts_options
from mmrouter_lib.families import Family
from mmrouter_lib.media_identity import foreign_identity, to_wire
from mmrouter_router.core.settings import Settings
from mmrouter_router.intake import ChatRequest
from mmrouter_router.intake.field_check import Reason
from mmrouter_router.request.prepared import ResolvedImage

FIELD = "mm_processor_kwargs"
MEDIA_CAUSES = frozenset({"processor_options"})
"""Causes against exactness that affect media alone: each item becomes unresolved."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The modelled options of one request, and the family under them."""

    family: Family
    options: Mapping[str, int]
    model: str

    def published(self, identity: bytes) -> bytes:
        """Return what stands in the engine's events for an image that it gets under an identity."""
        return foreign_identity(name_with_options(to_wire(identity), self.options, self.model))


@dataclass(frozen=True, slots=True)
class OptionReader:
    """Reads the options of a deployment's requests. ``model``: its path at the engines; empty: none are modelled."""

    family: Family | None
    model: str

    @classmethod
    def of(cls, settings: Settings, family: Family | None) -> Self:
        """Options are modelled where every engine takes them and has the model at the router's own path.

        Encoders and the hand-over of images know them by the router's names, so not beside these.
        """
        spec = settings.deployment.spec
        alone = spec.transfer == "none" and all(pool.role != "encoder" for pool in spec.pools)
        named = (
            spec.engine.type == "vllm"
            and spec.model.volume is not None
            and trusts_options(answering_args(settings.deployment))
        )
        return cls(family, str(settings.model_dir) if alone and named else "")

    def read(self, request: ChatRequest) -> RequestOptions | None:
        """Return the options of a request, ``None`` where it has none, or another reason against exact images."""
        given: Any = request.body.get(FIELD)
        if (
            not (given and self.model)
            or self.family is None
            or request.inexact != (Reason(FIELD, "processor_options"),)
        ):
            return None
        family = self.family.with_options(given) if isinstance(given, dict) else None
        return None if family is None else RequestOptions(family, given, self.model)


def under_options(
    request: ChatRequest, images: tuple[ResolvedImage, ...], options: RequestOptions | None, *, one_medium: bool
) -> tuple[ResolvedImage, ...]:
    """Return the images by their names under the request's options, and unresolved where these are not modelled.

    ``one_medium``: options for any medium are in the names of images.
    """
    if options is not None:
        images = tuple(
            replace(image, published=options.published(image.identity)) if image.modality == "image" else image
            for image in images
        )
    cause = next((reason.label for reason in request.inexact if reason.reason in MEDIA_CAUSES), "")
    if one_medium and request.body.get("media_io_kwargs"):
        cause = cause or "processor_options:media_io_kwargs"
    return tuple(
        replace(image, unresolved=cause) if cause and image.resolved and not image.published else image
        for image in images
    )
