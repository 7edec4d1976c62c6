"""What other programs of the folder's group can make of it, and a process without descriptors."""

import errno
import os
from pathlib import Path

import pytest

from mmrouter_handover.shm.janitor import MAX_DEPTH, ledger
from mmrouter_handover.shm.slot_format import HandOverError
from mmrouter_handover.shm.writer_folder import PlainFiles, used_bytes

DEEP = 1200  # more than Python's limit of recursion


def test_folders_nested_without_end_are_one_entry_and_their_bytes_are_counted(root: Path) -> None:
    made = [f"{root}/a"]
    made += [f"{root}/a" + "/a" * depth for depth in range(1, DEEP)]
    for folder in made:
        os.mkdir(folder)
    try:
        entries = [entry for entry in ledger(root, 0.0).entries if entry.path.startswith("a")]
        assert [entry.path.count("/") for entry in entries] == [MAX_DEPTH]
        assert used_bytes(root) >= 0
    finally:
        for folder in reversed(made):
            os.rmdir(folder)


def test_a_process_without_descriptors_hands_nothing_over_and_loses_no_space(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with PlainFiles(root, "w", 1 << 20) as folder:
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup", full)
            for _ in range(20):
                with pytest.raises(HandOverError, match="no descriptor"):
                    folder.put(bytes(100_000), seconds=9.0)
        assert folder.bytes == 0
        folder.put(bytes(100_000), seconds=9.0)
