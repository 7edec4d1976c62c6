"""The room stands alone: it is to run inside engines, which have another Python and few packages."""

import ast
import sys
from pathlib import Path

import pytest

import mmrouter_handover.shm

FILES = sorted(Path(mmrouter_handover.shm.__file__).parent.glob("*.py"))
ALLOWED = {"msgspec"}
PACKAGE = "mmrouter_handover.shm"
UNSAFE = {"pickle", "marshal", "shelve", "ctypes", "multiprocessing"}


def imported(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name.partition(".")[0] for name in found if name != PACKAGE and not name.startswith(f"{PACKAGE}.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_python_3_10_and_imports_the_standard_library_and_msgspec_and_nothing_that_unpickles(path):
    names = imported(ast.parse(path.read_text(), feature_version=(3, 10)))
    assert names <= set(sys.stdlib_module_names) | ALLOWED
    assert not names & UNSAFE


def test_the_whole_room_is_looked_at():
    assert {"pool.py", "plain_files.py", "reader.py", "reclaim.py", "ledger.py"} <= {path.name for path in FILES}
