"""A root on tmpfs where there is one, and a clock that the test turns."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

TMPFS = Path("/dev/shm")


@pytest.fixture
def root() -> Iterator[Path]:
    where = TMPFS if os.access(TMPFS, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="mmrouter-transfer-", dir=where))
    yield folder
    shutil.rmtree(folder)
