"""Size, frames and frame rate of a video, from the tables of its container. No frame is decoded.

The numbers are those of OpenCV 5 with FFmpeg 8, which vLLM 0.32 and 0.33 load videos with
(``OpenCVVideoBackendMixin.get_video_metadata``): the width and height that a frame is shown with, the number of frames,
and the frame rate. Where they depend on more than the tables, the video is not read. Frames that do not decode are left
out by vLLM; the tables do not tell of them.
"""

import struct

from mmrouter_lib.video_header import matroska, mp4
from mmrouter_lib.video_header.base import VideoHeader, VideoHeaderError

__all__ = ["VideoHeader", "VideoHeaderError", "read_video_header"]


def read_video_header(data: bytes) -> VideoHeader:
    """Return what the tables of an MP4, QuickTime, WebM or Matroska file say. Raises :class:`VideoHeaderError`."""
    if data[4:8] == mp4.MAGIC:
        read = mp4.read
    elif data.startswith(matroska.MAGIC):
        read = matroska.read
    else:
        raise VideoHeaderError("this is no MP4, QuickTime, WebM or Matroska file")
    try:
        return read(data)
    except (struct.error, IndexError) as error:
        raise VideoHeaderError("the file ends before its tables do") from error
