"""The compiled extension is used only with a matching revision, and returns the keys of the Python implementation."""

import logging
import sys
from array import array
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib import block_keys as blocks
from mmrouter_lib import native

U64 = (1 << 64) - 1
FAKE = "mmrouter_native_fake"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that fits; what this process has is taken again afterwards."""
    module = ModuleType(FAKE)
    module.REVISION = native.REVISION  # type: ignore[attr-defined]
    module.chain, module.pack_token_ids, module.HolderTable = len, repr, set  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, FAKE, module)
    yield module
    native.load()


def loaded(environment: dict[str, str] | None = None, module: str = FAKE) -> tuple[object, object, object, str, str]:
    native.load(environment or {}, module)
    return native.chain, native.pack_token_ids, native.HolderTable, native.form, native.why


def test_a_module_of_this_revision_is_used(fake: Any) -> None:
    assert loaded() == (fake.chain, fake.pack_token_ids, fake.HolderTable, "native", "")


def test_the_environment_variable_disables_the_extension(fake: Any) -> None:
    assert loaded({native.SWITCH: "0"}) == (None, None, None, "python", "MMROUTER_NATIVE is 0")
    assert loaded({native.SWITCH: "1"})[3] == "native"


@pytest.mark.parametrize("revision", [native.REVISION - 1, native.REVISION + 1, None, "1"])
def test_a_module_of_another_revision_is_not_used_and_logged_once(
    fake: Any, revision: Any, caplog: pytest.LogCaptureFixture
) -> None:
    if revision is None:
        del fake.REVISION
    else:
        fake.REVISION = revision
    with caplog.at_level(logging.INFO):
        assert loaded()[:4] == (None, None, None, "python")
    assert str(revision) in native.why
    assert [native.why in record.getMessage() for record in caplog.records] == [True]


def test_a_missing_module_is_not_logged(fake: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert loaded(module="mmrouter_native_missing")[:4] == (None, None, None, "python")
    assert native.why == "mmrouter_native_missing is not installed"
    assert caplog.records == []


def test_a_module_that_does_not_load_is_logged(
    fake: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mmrouter_native_broken.py").write_text("raise ImportError('of another processor')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert loaded(module="mmrouter_native_broken")[:4] == (None, None, None, "python")
    assert [record.getMessage() for record in caplog.records] == [f"{native.why}; using the Python implementation"]


@given(st.data(), st.sampled_from("IQ"), st.integers(1, 70), st.integers(0, 12), st.integers(0, U64))
def test_keys_equal_those_of_the_python_implementation(
    compiled: None, data: st.DataObject, typecode: str, size: int, count: int, seed: int
) -> None:
    item = array(typecode).itemsize
    tail = data.draw(st.integers(0, size))
    # Bytes instead of numbers: all of them are ids of either width, and long inputs are drawn quickly.
    ids = array(typecode, data.draw(st.binary(min_size=(n := item * (count * size + tail)), max_size=n)))
    numbers = st.integers(0, max(0, count - 1))
    extras = data.draw(st.dictionaries(numbers, st.binary(max_size=400)) if count else st.just({}))
    expected = blocks.python_chain(ids, size, count, extras, seed)
    assert blocks.chain(ids, size, count, extras, seed) == expected
    assert native.chain is not None
    raw = native.chain(ids, size, count, extras, seed)
    assert raw == (expected.tobytes() if count else None)


@pytest.mark.parametrize(
    ("block_size", "count", "extras"),
    [
        *[(size, count, {}) for size, count in ((2, 3), (0, 3), (-1, 3), (2, -1), (sys.maxsize, 2))],  # not in the ids
        *[(2, 2, {number: b"x"}) for number in (2, -1, U64, "0")],
        (2, 2, {0: "x"}),
    ],
)
def test_arguments_that_are_no_blocks_are_left_to_python(
    compiled: None, block_size: int, count: int, extras: Any
) -> None:
    assert native.chain is not None
    assert native.chain(array("I", range(5)), block_size, count, extras, 1) is None


def test_a_buffer_with_gaps_is_left_to_python(compiled: None) -> None:
    assert native.chain is not None
    gaps: Any = memoryview(array("I", range(8)))[::2]
    assert native.chain(gaps, 2, 2, {}, 1) is None
