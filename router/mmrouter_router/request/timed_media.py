"""Resolves the videos and audio of a chat: identity, and the header that the family makes a video's tokens of. Pure."""

from dataclasses import replace

from mmrouter_lib.families import Family, ImageSizeError
from mmrouter_lib.image_size import TooManyPixels
from mmrouter_lib.media_identity import media_identity
from mmrouter_lib.video_header import VideoHeaderError, read_video_header
from mmrouter_lib.wav_header import read_wav_header
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import MediaPart
from mmrouter_router.media.content import Media
from mmrouter_router.request.prepared import ResolvedImage


def resolve_timed(
    part: MediaPart, media: Media, key: bytes, *, family: Family | None, max_pixels: int, left: int, modelled_here: bool
) -> ResolvedImage:
    """Return a video or audio of a chat; one whose header does not tell its tokens is unresolved, and so is a video of
    more than ``left`` tokens.

    ``key``: of its identity. ``modelled_here``: whether the ``family`` models the tokens on this engine; otherwise a
    video is unresolved. Nothing is read of a modality that is not modelled. Raises :class:`RequestError` for a frame of
    more than ``max_pixels`` or a size that the engine refuses.
    """
    assert part.place is not None
    options = {} if family is None or part.kind == "audio" else family.pixel_options
    identity = media_identity(media.data, options, key=key, modality=part.kind)
    item = ResolvedImage(*part.place, part.param, media, identity, 0, 0, 1, modality=part.kind)
    sound = part.kind == "audio"
    if family is None or (family.audio_id if sound else family.video_id) is None or (sound and not modelled_here):
        return replace(item, modelled=False)
    if not modelled_here:
        return replace(item, unresolved=f"video:{part.param}")
    if sound:
        wav = read_wav_header(media.data)
        tokens = family.count_audio(wav) if wav is not None else None
        return replace(item, tokens=tokens) if tokens else replace(item, unresolved=f"audio:{part.param}")
    try:
        header = read_video_header(media.data)
        width, height = header.width, header.height
        if width * height > max_pixels:
            raise TooManyPixels(f"{width}x{height} pixels are more than the {max_pixels} allowed")
        tokens = family.count_video(header)
    except VideoHeaderError as error:
        return replace(item, unresolved=f"{error.cause}:{part.param}")
    except (ImageSizeError, TooManyPixels) as error:
        message = f"The video cannot be used: {error}."
        raise RequestError.invalid(message, param=part.param, code="invalid_video") from error
    if tokens > left:
        return replace(item, unresolved=f"prompt_size:{part.param}")
    return replace(item, width=width, height=height, tokens=tokens, video=header)
