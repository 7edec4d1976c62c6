"""A writer or a reader of its own, told what to do by lines of JSON; the soak kills it at any point.

What a payload holds follows from its number alone, so a reader knows what it must see without asking the writer. Every
third one travels as a plain file, the others by leased slots.
"""

import json
import random
import sys
from pathlib import Path

from mmrouter_handover.shm import HandOverError, PlainFile, Plains, Pool, Reader, View, read_handle

SIZES = (1000, 65_536, 150_000, 400_000)
LIMIT_BYTES = 3 << 20
"""A few slots, so that each is used again and again while others are read."""
LEASE_SECONDS = 1.0


def payload(number: int) -> bytes:
    """Return the bytes of a payload: no two are alike in any part."""
    rnd = random.Random(number)
    return rnd.randbytes(SIZES[number % len(SIZES)])


def is_plain(number: int) -> bool:
    """Whether a payload travels as a plain file."""
    return number % 3 == 0


def is_cancelled(number: int) -> bool:
    """Whether the request is cancelled before its payload is read: what its reader is told of is not there."""
    return number % 7 == 0


def write(root: str) -> None:
    """Answer ``{"number"}`` with a handle or a path, or with the reason why there is none; ``{"done"}`` gives it up."""
    files: dict[int, PlainFile] = {}
    with Pool(root, "soak", limit_bytes=LIMIT_BYTES) as pool, Plains(root, "soak", LIMIT_BYTES) as plains:
        for line in sys.stdin:
            asked = json.loads(line)
            if "done" in asked:
                if (file := files.pop(asked["done"], None)) is not None:
                    file.release()
                say({})
                continue
            number = asked["number"]
            try:
                if is_plain(number):
                    files[number] = file = plains.put(payload(number), ".png", seconds=LEASE_SECONDS)
                    if is_cancelled(number):
                        files.pop(number).release()
                    say({"path": str(file.path)})
                    continue
                lease = pool.put(payload(number), str(number), seconds=LEASE_SECONDS)
            except HandOverError as error:
                say({"failed": error.reason})
                continue
            assert lease.handle is not None
            if is_cancelled(number):
                lease.release()
            say({"handle": lease.handle.to_json()})


def read(root: str) -> None:
    """Open, look, hold and let go: ``wrong`` in an answer is a read of something else than was written."""
    views: dict[int, View] = {}
    with Reader(root) as reader:
        for line in sys.stdin:
            asked = json.loads(line)
            number = asked["number"]
            if "path" in asked:
                try:  # as an engine does that knows nothing of us
                    say({"wrong": Path(asked["path"]).read_bytes() != payload(number)})
                except FileNotFoundError:
                    say({"failed": "gone"})
                continue
            if "handle" not in asked:
                view = views.pop(number, None)
                if view is None:
                    say({})
                    continue
                wrong = bytes(view.data) != payload(number)  # nobody wrote to it while it was held
                view.release()
                say({"wrong": wrong})
                continue
            try:
                view = reader.open(read_handle(asked["handle"]))
            except HandOverError as error:
                say({"failed": error.reason})
                continue
            wrong = bytes(view.data) != payload(number)
            if asked["hold"]:
                views[number] = view
            else:
                view.release()
            say({"wrong": wrong})


def say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](sys.argv[2])
