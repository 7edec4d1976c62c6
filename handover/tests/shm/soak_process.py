"""A writer or reader process for the soak test, controlled by lines of JSON; the soak kills it at any point.

The content of a payload follows from its number alone, so a reader can verify it without the writer. Every third one
travels as a plain file, the others by leased slots.
"""

import json
import random
import sys
from pathlib import Path

from mmrouter_handover.shm import HandOverError, PlainFile, PlainFiles, Pool, Reader, View, read_handle

SIZES = (1000, 65_536, 150_000, 400_000)
LIMIT_BYTES = 3 << 20
"""A few slots, so that each is reused while others are read."""
LEASE_SECONDS = 1.0


def payload(number: int) -> bytes:
    """Return the bytes of a payload; any two payloads differ everywhere."""
    return random.Random(number).randbytes(SIZES[number % len(SIZES)])


def is_plain(number: int) -> bool:
    """Whether a payload travels as a plain file."""
    return number % 3 == 0


def is_cancelled(number: int) -> bool:
    """Whether the request is cancelled before its payload is read."""
    return number % 7 == 0


def write(root: str) -> None:
    """Answer ``{"number"}`` with a handle or a path, or with the reason of a failure; ``{"done"}`` releases it."""
    files: dict[int, PlainFile] = {}
    with Pool(root, "soak", limit_bytes=LIMIT_BYTES) as pool, PlainFiles(root, "soak", LIMIT_BYTES) as plains:
        for line in sys.stdin:
            question = json.loads(line)
            if "done" in question:
                if (file := files.pop(question["done"], None)) is not None:
                    file.release()
                answer({})
                continue
            number = question["number"]
            try:
                if is_plain(number):
                    files[number] = file = plains.put(payload(number), ".png", seconds=LEASE_SECONDS)
                    if is_cancelled(number):
                        files.pop(number).release()
                    answer({"path": str(file.path)})
                    continue
                lease = pool.put(payload(number), str(number), seconds=LEASE_SECONDS)
            except HandOverError as error:
                answer({"failed": error.reason})
                continue
            assert lease.handle is not None
            if is_cancelled(number):
                lease.release()
            answer({"handle": lease.handle.to_json()})


def read(root: str) -> None:
    """Open, verify, hold and release payloads; ``wrong`` in an answer means that other bytes were read."""
    views: dict[int, View] = {}
    with Reader(root) as reader:
        for line in sys.stdin:
            question = json.loads(line)
            number = question["number"]
            if "path" in question:
                try:  # as an engine without this library does
                    answer({"wrong": Path(question["path"]).read_bytes() != payload(number)})
                except FileNotFoundError:
                    answer({"failed": "gone"})
                continue
            if "handle" not in question:
                view = views.pop(number, None)
                if view is None:
                    answer({})
                    continue
                wrong = bytes(view.data) != payload(number)  # must not change while the view is held
                view.release()
                answer({"wrong": wrong})
                continue
            try:
                view = reader.open(read_handle(question["handle"]))
            except HandOverError as error:
                answer({"failed": error.reason})
                continue
            wrong = bytes(view.data) != payload(number)
            if question["hold"]:
                views[number] = view
            else:
                view.release()
            answer({"wrong": wrong})


def answer(values: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](sys.argv[2])
