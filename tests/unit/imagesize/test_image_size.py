"""Sizes from headers, against Pillow, which the engines decode with."""

import io
import math
import random
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps, PngImagePlugin
from unit.conftest import shared_folder
from unit.counted_lines import counted_lines

from mmrouter_lib.image_size import FORMATS, ImageHeaderError, ImageSize, TooManyPixels, claimed_size, probe, rotates

# Pillow warns of what the tests feed it on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:PIL.TiffImagePlugin"),
]

LIMIT = 200_000_000
ORIENTATION = 0x0112
XMP = (
    b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" '
    b'tiff:Orientation="%d"/></x:xmpmeta>'
)


def encode(kind: str, size: tuple[int, int] = (30, 20), **options: object) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (200, 100, 50)).save(out, kind, **options)
    return out.getvalue()


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    tags[0x010F] = "a maker"
    return tags


def shown(data: bytes) -> tuple[int, int]:
    """The size after loading as vLLM loads: EXIF applied, a broken one ignored."""
    image = Image.open(io.BytesIO(data))
    try:
        return ImageOps.exif_transpose(image).size
    except Exception:
        return image.size


def refused(data: bytes, error: type[Exception], says: str | None = None, limit: int = LIMIT) -> None:
    with pytest.raises(error, match=says):
        probe(data, max_pixels=limit, exif=True)


def probed(data: bytes, *, turned: bool = True) -> tuple[int, int]:
    size = probe(data, max_pixels=LIMIT, exif=turned)
    return size.width, size.height


@pytest.fixture(scope="session")
def images() -> Path:
    if not (folder := shared_folder("MMROUTER_MODELS", "models").parent / "images").is_dir():
        pytest.skip(f"not run: no images at {folder}")
    return folder


def test_every_test_image_is_read_as_pillow_reads_it(images: Path):
    sizes = 0
    for path in sorted(images.iterdir()):
        data = path.read_bytes()
        if path.suffix in (".md", ".json") or path.name in ("empty.png", "not_an_image.jpg"):
            refused(data, ImageHeaderError)
            continue
        if path.name.startswith("bomb_header"):
            refused(data, TooManyPixels)
            continue
        size = probe(data, max_pixels=LIMIT, exif=False)
        with Image.open(io.BytesIO(data)) as image:
            assert (size.width, size.height, size.format) == (*image.size, image.format), path.name
        sizes += 1
    assert sizes == 24


def test_orientation_six_applies_only_with_exif(images: Path):
    data = (images / "exif_orientation6_480x320.jpg").read_bytes()
    assert probe(data, max_pixels=LIMIT, exif=True) == ImageSize(320, 480, "JPEG", turned=True)
    assert probe(data, max_pixels=LIMIT, exif=False) == ImageSize(480, 320, "JPEG")


def test_a_truncated_image_with_a_whole_header_has_a_size(images: Path):
    assert probed((images / "truncated_half.jpg").read_bytes()) == (640, 480)
    assert probed((images / "rgb_640x480.png").read_bytes()[:40]) == (640, 480)
    assert probed((images / "rgb_400x300.webp").read_bytes()[:40]) == (400, 300)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read(kind):
    assert probe(encode(kind, (31, 7)), max_pixels=31 * 7, exif=True) == ImageSize(31, 7, kind)


@pytest.mark.parametrize("kind", ["ICO", "PPM", "JPEG2000", "TGA"])
def test_any_other_format_is_refused(kind):
    refused(encode(kind), ImageHeaderError, "known format")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_exif_orientation_turns_as_pillow_turns(kind, orientation):
    data = encode(kind, exif=exif(orientation))
    assert probed(data) == shown(data)
    assert probed(data) == ((20, 30) if 5 <= orientation <= 8 else (30, 20))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_no_orientation_turns_where_the_engine_does_not_look_at_exif(kind: str) -> None:
    assert probed(encode(kind, exif=exif(6)), turned=False) == (30, 20)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_xmp_orientation_turns_where_exif_has_none(kind, orientation):
    packet = XMP % orientation
    if kind == "PNG":
        info = PngImagePlugin.PngInfo()
        info.add_itxt("XML:com.adobe.xmp", packet.decode(), zip=True)
        data = encode(kind, pnginfo=info)
    elif kind == "TIFF":
        data = encode(kind, tiffinfo={700: packet})
    else:
        data = encode(kind, xmp=packet)
    assert probed(data) == shown(data) == ((20, 30) if orientation == 6 else (30, 20))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_exif_overrides_xmp_and_a_broken_exif_disables_both(kind):
    both = encode(kind, exif=exif(1), xmp=XMP % 6)
    assert probed(both) == shown(both) == (30, 20)
    broken = encode(kind, exif=b"Exif\0\0MM\0*\0\0", xmp=XMP % 6)
    assert probed(broken) == shown(broken)


def test_a_tiff_is_turned_even_where_the_engine_does_not_look_at_exif():
    # Pillow turns a TIFF while it loads it.
    data = encode("TIFF", exif=exif(6))
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        assert probed(data, turned=False) == image.size == (20, 30)


def test_a_tiff_with_both_tags_is_turned_once():
    data = encode("TIFF", tiffinfo={ORIENTATION: 6, 700: XMP % 6})
    assert probed(data) == shown(data) == (20, 30)


def test_webp_metadata_without_its_flag_is_no_metadata():
    data = bytearray(encode("WEBP", exif=exif(6), xmp=XMP % 1))
    assert probed(bytes(data)) == (20, 30)
    data[20] &= ~0x08
    assert probed(bytes(data)) == shown(bytes(data)) == (30, 20)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def test_nothing_counts_behind_a_chunk_of_a_png_that_is_none():
    plain, tags = encode("PNG"), exif(6).tobytes().removeprefix(b"Exif\0\0")
    data = plain[:-12] + png_chunk(b"L\x04\x01\x86", b"") + png_chunk(b"eXIf", tags) + plain[-12:]
    assert probed(data) == shown(data) == (30, 20)


def test_an_exif_chunk_behind_the_pixels_of_a_png_counts():
    plain, tags = encode("PNG"), exif(6).tobytes().removeprefix(b"Exif\0\0")
    end = plain.rindex(b"IEND") - 4
    data = plain[:end] + png_chunk(b"eXIf", tags) + plain[end:]
    assert probed(data) == shown(data) == (20, 30)


@pytest.mark.parametrize("kind", [b"tEXt", b"zTXt"])
def test_the_raw_profile_of_older_png_writers_counts(kind):
    tags = exif(8).tobytes()
    text = f"\nexif\n{len(tags):8}\n{tags.hex()}\n".encode()
    body = b"Raw profile type exif\0" + (text if kind == b"tEXt" else b"\0" + zlib.compress(text))
    plain = encode("PNG")
    data = plain[:33] + png_chunk(kind, body) + plain[33:]
    assert probed(data) == shown(data) == (20, 30)
    broken = plain[:33] + png_chunk(b"tEXt", b"Raw profile type exif\0\nexif\n4\nzz\n") + plain[33:]
    assert probed(broken) == shown(broken) == (30, 20)


def test_junk_and_padding_between_jpeg_segments_is_skipped_as_pillow_skips_it():
    plain = encode("JPEG")
    for filler in (b"junk", b"\xff\xff\xff", b"\xff\x00\x01"):
        data = plain[:2] + filler + plain[2:]
        data = data[:2] + b"\xff\xe0\x00\x02" + data[2:]
        assert probed(data) == shown(data) == (30, 20)


def test_two_exif_segments_of_a_jpeg_are_one():
    blob = exif(6).tobytes()
    half = len(blob) // 2
    parts = [blob[:half], b"Exif\0\0" + blob[half:]]
    segments = b"".join(b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part for part in parts)
    plain = encode("JPEG")
    data = plain[:2] + segments + plain[2:]
    assert probed(data) == shown(data) == (20, 30)


def test_a_header_that_claims_too_many_pixels_is_refused_before_anything_is_allocated():
    huge = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0))
    canvas = b"RIFF\x40\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\x3f\0\xff\x3f\0"
    screen = b"GIF89a\xff\xff\xff\xff\0\0\0" + b",\0\0\0\0\xff\xff\xff\xff\0\x02\0"
    for data in (huge, canvas, screen):
        refused(data, TooManyPixels, limit=64_000_000)
    refused(encode("JPEG"), TooManyPixels, "30x20", limit=599)


HEADS = [b"\xff\xd8\xff\xd9", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP", b"BM", b"II*\0", b"GIF89a"]


@pytest.mark.parametrize("data", HEADS)
def test_a_magic_number_alone_is_no_header(data):
    refused(data, ImageHeaderError)


def test_an_empty_image_is_refused():
    png = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 0, 5, 8, 2, 0, 0, 0))
    refused(png, ImageHeaderError, "empty")


SAMPLES = [
    *(encode(kind) for kind in FORMATS),
    *(encode(kind, exif=exif(6)) for kind in ("JPEG", "PNG", "WEBP", "TIFF")),
]
MAGIC = [b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\x40\0\0\0WEBPVP8X", b"GIF89a", b"BM", b"II*\0", b"MM\0*", b""]


def only_our_errors(data: bytes) -> None:
    for turned in (True, False):
        try:
            size = probe(data, max_pixels=LIMIT, exif=turned)
        except (ImageHeaderError, TooManyPixels):
            continue
        assert size.width * size.height <= LIMIT


@given(st.sampled_from(MAGIC), st.binary(max_size=300))
def test_arbitrary_bytes_raise_nothing_but_the_two_errors(magic, rest):
    only_our_errors(magic + rest)


@given(st.sampled_from(SAMPLES), st.data())
def test_cut_and_damaged_images_raise_nothing_but_the_two_errors(sample, data):
    cut = bytearray(sample[: data.draw(st.integers(0, len(sample)))])
    for at in data.draw(st.lists(st.integers(0, max(len(cut) - 1, 0)), max_size=4)):
        if cut:
            cut[at] = data.draw(st.integers(0, 255))
    only_our_errors(bytes(cut))


def served(data: bytes, *, turned: bool = True, max_pixels: float = math.inf) -> tuple[int, int] | None:
    """The size that an engine serves, which skips a transpose that fails; ``None`` where it refuses the image."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > max_pixels:
            return None
        if turned:
            with suppress(Exception):
                image = ImageOps.exif_transpose(image)
        image.load()
        return image.convert("RGB").size
    except Exception:  # Pillow raises many types for damaged files, and an engine refuses all of them
        return None


def predicted(data: bytes) -> tuple[int, int]:
    """The size that the router predicts: rotated only where rotating succeeds."""
    size = probe(data, max_pixels=LIMIT, exif=True)
    return (size.height, size.width) if size.turned and not rotates(data) else (size.width, size.height)


@pytest.mark.parametrize(("kind", "size"), [(2, (20, 30)), (9, (30, 20))], ids=["text", "signed number"])
def test_an_image_whose_rotation_fails_is_predicted_unrotated(kind: int, size: tuple[int, int]) -> None:
    """Rotating writes the EXIF structure anew, which fails for a text with the type of a number."""
    tags = exif(6)
    tags[0x0110] = "a model"
    data = encode("JPEG", exif=tags)
    at = data.index(struct.pack(">HH", 0x0110, 2))
    data = data[: at + 2] + struct.pack(">H", kind) + data[at + 4 :]
    assert predicted(data) == served(data) == size


@pytest.mark.parametrize("size", [(30, 4), (6, 30), (7, 7), (1, 1)])
def test_a_jpeg_with_a_side_under_eight_pixels_is_rotated(size: tuple[int, int]) -> None:
    data = encode("JPEG", size, exif=exif(6))
    assert rotates(data)
    assert predicted(data) == served(data) == size[::-1]


def test_a_tiff_with_damaged_pixels_is_predicted_as_pillow_leaves_it() -> None:
    """Pillow rotates a TIFF when it has read its pixels, and raises for damaged ones after that."""
    data = bytearray(encode("TIFF", compression="tiff_lzw", tiffinfo={700: XMP % 8}))
    at, length = (Image.open(io.BytesIO(data)).tag_v2[tag][0] for tag in (273, 279))
    data[at : at + length] = b"\xff" * length
    assert predicted(bytes(data)) == served(bytes(data)) == (20, 30)


def test_damaged_headers_and_pixels_have_the_size_that_the_engine_serves() -> None:
    source = random.Random(11)
    compared = 0
    for _ in range(3000):
        sample = bytearray(source.choice(SAMPLES))
        for _ in range(source.randrange(1, 3)):
            sample[source.randrange(3, len(sample))] = source.randrange(256)
        data = bytes(sample)
        want = served(data)
        if want is None:
            continue
        if want[0] * want[1] <= LIMIT:
            assert predicted(data) == want
            compared += 1
    assert compared > 1000


def test_a_png_may_have_another_chunk_before_its_size() -> None:
    plain = encode("PNG")
    data = plain[:8] + png_chunk(b"tEXt", b"Comment\0first") + plain[8:]
    assert probed(data) == shown(data) == (30, 20)


def segment(kind: int, body: bytes) -> bytes:
    return b"\xff" + bytes([kind]) + struct.pack(">H", len(body) + 2) + body


def directory(tags: int, values: int = 1) -> bytes:
    """A TIFF whose first directory has many tags, or tags of many numbers."""
    entries = b"".join(struct.pack("<HHII", 1000 + tag, 4, values, 8) for tag in range(tags))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", tags) + entries + bytes(4)


PNG_HEAD = encode("PNG")[:33]
XMP_TEXT = b"XML:com.adobe.xmp\0"
WEBP_HEAD = b"WEBPVP8X\x0a\0\0\0\x0c\0\0\0\x1d\0\0\x13\0\0"
GIF_HEAD = b"GIF89a" + struct.pack("<HHBBB", 30, 20, 0, 0, 0)
HOSTILE = {
    "small EXIF segments": (b"\xff\xd8", segment(0xE1, b"Exif\0\0" + bytes(94))),
    "large EXIF segments": (b"\xff\xd8", segment(0xE1, b"Exif\0\0" + bytes(60_000))),
    "padding": (b"\xff\xd8", b"\xff" * 64),
    "escapes": (b"\xff\xd8\xff\xe0\0\2", b"a\xff\0"),
    "junk": (b"\xff\xd8\xff\xe0\0\2", b"a" * 64),
    "compressed texts": (PNG_HEAD, png_chunk(b"zTXt", XMP_TEXT + b"\0" + zlib.compress(bytes(1 << 20)))),
    "empty chunks": (PNG_HEAD, png_chunk(b"IDAT", b"")),
    "a long text": (PNG_HEAD + struct.pack(">I", 1 << 30) + b"tEXt" + XMP_TEXT, b"tiff:Orientation"),
    "a long profile": (PNG_HEAD + struct.pack(">I", 1 << 30) + b"tEXtRaw profile type exif\0", b"\n" * 64),
    "WebP chunks": (b"RIFF\xff\xff\xff\x7f" + WEBP_HEAD, b"ABCD\0\0\0\0"),
    "GIF comments": (GIF_HEAD + b"!\xfe", b"\1a"),
    "GIF zeros": (GIF_HEAD, bytes(64)),
    "TIFF tags": (directory(60_000), bytes(64)),
    "TIFF numbers": (directory(1024, 60_000), bytes(64)),
    "EXIF tags": (b"\xff\xd8" + segment(0xE1, b"Exif\0\0" + directory(5_000)), b"\xff\0"),
    "AVIF sizes": (b"\0\0\0\x18ftypavif", b"ispe"),
}
MOST_LINES = 400_000
"""Lines of Python for any header: about 15 for each of the chunks of a PNG that are read."""


def lines_run(data: bytes) -> int:
    """Return how many lines of Python the readers run, which does not depend on the machine."""
    with counted_lines() as counted, suppress(ImageHeaderError, TooManyPixels):
        claimed_size(data, max_pixels=LIMIT) or probe(data, max_pixels=LIMIT, exif=True)
    return counted.lines


@pytest.mark.parametrize(("head", "piece"), HOSTILE.values(), ids=list(HOSTILE))
def test_the_work_for_a_header_is_bounded_whatever_its_bytes(head: bytes, piece: bytes) -> None:
    short, long = (lines_run(head + piece * (size // len(piece))) for size in (5_000_000, 20_000_000))
    assert long <= MOST_LINES
    assert long <= short * 1.01 + 100


def test_metadata_of_cameras_and_editors_are_within_the_bounds() -> None:
    """A depth map of 20 MB in extended XMP, an ICC profile in 40 segments, and 1 MB of editing history."""
    plain, tags = encode("JPEG", exif=exif(6)), b"http://ns.adobe.com/xmp/extension/\0"
    many = segment(0xE1, tags + bytes(65_000)) * 320 + segment(0xE2, b"ICC_PROFILE\0" + bytes(65_000)) * 40
    assert probed(plain[:2] + many + plain[2:]) == (20, 30)
    history = png_chunk(b"iTXt", XMP_TEXT + bytes(4) + bytes(1 << 20) + XMP % 6)
    assert probed(PNG_HEAD + history + png_chunk(b"IDAT", bytes(8192)) * 2560) == (20, 30)
