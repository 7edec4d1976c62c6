"""Resolves the videos of a chat: identity, and the header that the family makes tokens of. Pure."""

from dataclasses import replace

from mmrouter_lib.families import Family, ImageSizeError
from mmrouter_lib.image_size import TooManyPixels
from mmrouter_lib.media_identity import media_identity
from mmrouter_lib.video_header import VideoHeaderError, read_video_header
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import MediaPart
from mmrouter_router.media.content import Media
from mmrouter_router.request.prepared import ResolvedImage


def resolve_video(
    part: MediaPart, media: Media, key: bytes, family: Family | None, *, max_pixels: int, left: int
) -> ResolvedImage:
    """Return a video of a chat; one of more than ``left`` tokens, or whose header does not tell, is unresolved.

    ``key``: of its identity. Without a ``family`` that models videos its header is not read. Raises
    :class:`RequestError` for a frame of more than ``max_pixels`` or a size that the engine refuses.
    """
    assert part.place is not None
    options = {} if family is None else family.pixel_options
    identity = media_identity(media.data, options, key=key, modality="video")
    video = ResolvedImage(*part.place, part.param, media, identity, 0, 0, 1, modality="video")
    if family is None:
        return replace(video, modelled=False)
    try:
        header = read_video_header(media.data)
        width, height = header.width, header.height
        if width * height > max_pixels:
            raise TooManyPixels(f"{width}x{height} pixels are more than the {max_pixels} allowed")
        tokens = family.count_video(header)
    except VideoHeaderError as error:
        return replace(video, unresolved=f"{error.cause}:{part.param}")
    except (ImageSizeError, TooManyPixels) as error:
        message = f"The video cannot be used: {error}."
        raise RequestError.invalid(message, param=part.param, code="invalid_video") from error
    if tokens > left:
        return replace(video, unresolved=f"prompt_size:{part.param}")
    return replace(video, width=width, height=height, tokens=tokens, video=header)
