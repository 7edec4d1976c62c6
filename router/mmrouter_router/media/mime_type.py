"""Detection of a media type from the first bytes. Pure.

The type labels bytes for the engine and tells web pages from media; ``mmrouter_lib.image_size`` validates images.
"""

UNKNOWN = "application/octet-stream"

_PREFIXES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
    (b"\x1aE\xdf\xa3", "video/webm"),
    (b"OggS", "audio/ogg"),
    (b"fLaC", "audio/flac"),
    (b"ID3", "audio/mpeg"),
    (b"\xff\xfb", "audio/mpeg"),
    (b"\xff\xf3", "audio/mpeg"),
    (b"\xff\xf2", "audio/mpeg"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
_BRANDS = {
    b"avif": "image/avif",
    b"avis": "image/avif",
    b"heic": "image/heic",
    b"heix": "image/heic",
    b"mif1": "image/heif",
    b"M4A ": "audio/mp4",
    b"qt  ": "video/quicktime",
}
_PAGES = (b"<!doctype html", b"<html", b"<head", b"<body", b"<script", b"<?xml", b"<svg")


def detect(data: bytes) -> str:
    """Return the media type of the bytes, :data:`UNKNOWN` where no signature matches."""
    for prefix, kind in _PREFIXES:
        if data.startswith(prefix):
            return kind
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12], UNKNOWN)
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "video/mp4")
    return UNKNOWN


def is_page(data: bytes) -> bool:
    """Return whether the bytes are HTML or XML, which origins often answer in place of an image."""
    return data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_PAGES)
