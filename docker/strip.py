"""Remove symbols and debugging information from the extension modules and libraries below a folder.

    python3 docker/strip.py FOLDER

The dynamic loader reads the segments of an ELF file only. What stands behind the last one, and the table of sections
with it, is for linkers and debuggers: 12 of uvloop's 14 MB. A base image has no ``strip``.
"""

import struct
import sys
from pathlib import Path

ELF_64_LITTLE = b"\x7fELF\x02\x01"
SEGMENT = struct.Struct("<8xQ16xQ16x")  # offset and size in the file


def stripped(content: bytes) -> bytes:
    """Return a 64-bit little-endian ELF file without what is in no segment, any other content as it is.

    The offsets are those of ``Elf64_Ehdr`` in the System V ABI.
    """
    if not content.startswith(ELF_64_LITTLE):
        return content
    (table,) = struct.unpack_from("<Q", content, 0x20)
    entry, entries = struct.unpack_from("<HH", content, 0x36)
    segments = (SEGMENT.unpack_from(content, table + number * entry) for number in range(entries))
    end = max([table + entry * entries, *(offset + size for offset, size in segments)])
    kept = bytearray(content[:end])
    struct.pack_into("<Q", kept, 0x28, 0)  # place of the table of sections
    struct.pack_into("<HH", kept, 0x3C, 0, 0)  # number of sections, and which has their names
    return bytes(kept)


def main() -> None:
    for path in Path(sys.argv[1]).rglob("*.so*"):
        if path.is_file() and not path.is_symlink():
            path.write_bytes(stripped(path.read_bytes()))


if __name__ == "__main__":
    main()
