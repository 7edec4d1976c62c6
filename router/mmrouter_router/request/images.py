"""Resolves the images of a request: identity, size by the header, and tokens by the family."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from blake3 import blake3

from mmrouter_lib.families import Family, ImageSizeError
from mmrouter_lib.image_size import ImageHeaderError, TooManyPixels, claimed_size, probe, rotates
from mmrouter_lib.media_identity import media_identity
from mmrouter_router.core.errors import RequestError
from mmrouter_router.core.worker_threads import WorkerThreads
from mmrouter_router.intake import ImagePart
from mmrouter_router.media.content import Media
from mmrouter_router.request.prepared import ResolvedImage

PROBE_CACHE = 4096
MAX_ROTATED = 16_000_000
"""Pixels up to which it is tried whether a PNG or WebP rotates: 8 bytes of memory each. A JPEG is decoded smaller."""


class _Probed(NamedTuple):
    """Size and tokens of an image. ``turned``: still to be rotated; ``certain``: the engine is sure to see the same."""

    width: int
    height: int
    tokens: int = 0
    turned: bool = False
    certain: bool = True


class ImageResolver:
    """Resolves images of up to ``max_pixels``, and remembers the recent ones by their identities."""

    def __init__(self, threads: WorkerThreads, max_pixels: int) -> None:
        self._threads, self._max_pixels = threads, max_pixels
        self._probed: OrderedDict[bytes, _Probed] = OrderedDict()

    async def resolve(
        self, part: ImagePart, media: Media, key: bytes, tenant: str, family: Family | None
    ) -> ResolvedImage:
        """Return an image; one whose header does not tell its size is unresolved.

        ``key``: of its identity. Raises :class:`RequestError` for one that the engine refuses.
        """
        data = media.data
        identity, known = await self._threads.run(tenant, len(data), self._inspect, data, part.param, key, family)
        if known.turned and not await self._threads.run(tenant, known.width * known.height, rotates, data):
            known = known._replace(width=known.height, height=known.width)
        if known.turned or identity not in self._probed:
            known = self._probed[identity] = known._replace(turned=False, tokens=_count(known, part.param, family))
            if len(self._probed) > PROBE_CACHE:
                self._probed.popitem(last=False)
        unresolved = "" if known.certain else f"image_format:{part.param}"
        where = part.message, part.part, part.param
        return ResolvedImage(*where, media, identity, known.width, known.height, known.tokens, unresolved)

    def _inspect(self, data: bytes, param: str, key: bytes, family: Family | None) -> tuple[bytes, _Probed]:
        """Return the identity of an image, and its size by an earlier probe or by its header."""
        options: Mapping[str, Any] = family.pixel_options if family is not None else {}
        identity = media_identity(data, options, key=key)
        if (known := self._probed.get(identity)) is not None:
            return identity, known
        try:
            size = claimed_size(data, max_pixels=self._max_pixels)
            if size is not None:
                return identity, _Probed(size.width, size.height, certain=False)
            exif = family is not None and family.rotates_exif
            size = probe(data, max_pixels=self._max_pixels, exif=exif)
            if size.turned and size.format != "JPEG" and size.width * size.height > MAX_ROTATED:
                return identity, _Probed(size.width, size.height, certain=False)
            return identity, _Probed(size.width, size.height, turned=size.turned)
        except (ImageHeaderError, TooManyPixels) as error:
            raise _invalid_image(error, param) from error


def name_by_neighbours(
    images: tuple[ResolvedImage, ...], family: Family | None, *, rename_beside_videos: bool
) -> tuple[ResolvedImage, ...]:
    """Return the media with the names that the engine derives from the whole request.

    An image that is padded to another is named apart for each size that it is padded to. Beside an image whose size is
    not known all others are unresolved. ``rename_beside_videos``: so are all media beside a video, which renames them.
    """
    if rename_beside_videos and any(image.modality == "video" and image.modelled for image in images):
        return tuple(_unresolved(image, "video") for image in images)
    shown = [image for image in images if image.modality == "image"]
    if family is None or not family.pads_images or len(shown) < 2:
        return images
    if not all(image.resolved for image in shown):
        return tuple(_unresolved(image, "padding") if image.modality == "image" else image for image in images)
    paddings = iter(family.paddings([(image.width, image.height) for image in shown]))
    return tuple(_padded(image, next(paddings)) if image.modality == "image" else image for image in images)


def _unresolved(image: ResolvedImage, cause: str) -> ResolvedImage:
    return replace(image, unresolved=f"{cause}:{image.param}") if image.resolved else image


def _padded(image: ResolvedImage, padding: tuple[int, int] | None) -> ResolvedImage:
    if padding is None:
        return image
    width, height = padding
    name = blake3(b"padded to %dx%d:" % (width, height) + image.identity).digest()
    return replace(image, published=name, padding=padding)


def _count(known: _Probed, param: str, family: Family | None) -> int:
    """Return the visual tokens of an image, 0 without a family."""
    try:
        return family.count(known.width, known.height) if family is not None else 0
    except ImageSizeError as error:
        raise _invalid_image(error, param) from error


def _invalid_image(error: Exception, param: str) -> RequestError:
    return RequestError.invalid(f"The image cannot be used: {error}.", param=param, code="invalid_image")
