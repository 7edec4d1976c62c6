"""The shared-memory package runs inside engines: Python 3.10, no imports but the standard library and msgspec."""

import ast
import sys
from pathlib import Path

import pytest

import mmrouter_handover.shm

PACKAGE = "mmrouter_handover.shm"
FILES = sorted(Path(mmrouter_handover.shm.__file__).parent.glob("*.py"))
UNSAFE = {"pickle", "marshal", "shelve", "ctypes", "multiprocessing"}


def imported_modules(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names if name != PACKAGE and not name.startswith(f"{PACKAGE}.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_module_is_python_3_10_and_imports_only_the_standard_library_and_msgspec(path):
    names = imported_modules(ast.parse(path.read_text(), feature_version=(3, 10)))
    assert names <= set(sys.stdlib_module_names) | {"msgspec"}
    assert not names & UNSAFE


def test_every_module_is_checked():
    assert {"pool.py", "plain_files.py", "reader.py", "reclaim.py", "ledger.py"} <= {path.name for path in FILES}
