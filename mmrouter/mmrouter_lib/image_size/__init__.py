"""Sizes of encoded images from their headers, within bounds that hold for hostile bytes, too."""

from mmrouter_lib.image_size.claimed import claimed_size
from mmrouter_lib.image_size.probe import FORMATS, probe, rotates
from mmrouter_lib.image_size.reader_base import ImageHeaderError, ImageSize, TooManyPixels

__all__ = ["FORMATS", "ImageHeaderError", "ImageSize", "TooManyPixels", "claimed_size", "probe", "rotates"]
