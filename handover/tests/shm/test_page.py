"""The examples of docs/transfer.md run, and its table lists every reason."""

import re
from pathlib import Path
from typing import get_args

from mmrouter_handover.shm import HandOverError, Pool, Reader, Reason, read_handle

PAGE = (Path(__file__).parents[3] / "docs" / "transfer.md").read_text()
WRITER, READER = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_examples_hand_a_payload_over_and_fall_back_when_it_is_gone(root):
    pixels = bytes(range(256)) * (1024 * 1176 * 2 // 256)
    used, fetched = [], []
    names = {
        "root": root, "pixels": pixels, "fetch": fetched.append, "use": lambda data: used.append(bytes(data)),
        "Pool": Pool, "Reader": Reader, "HandOverError": HandOverError, "read_handle": read_handle,
    }  # fmt: skip
    exec(WRITER, names)
    exec(READER, names)
    assert (used == [pixels], fetched) == (True, [])
    names["pool"].close()
    exec(READER, names)
    assert (len(used), fetched) == (1, ["image 0"])


def test_every_reason_is_explained():
    (table,) = (part for part in PAGE.split("\n\n") if part.startswith("| reason | what |") and "\n| `stale` |" in part)
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(get_args(Reason))
