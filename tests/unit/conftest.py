"""Hypothesis searches a tenth of its default in the inner loop, three tenths in CI, where the examples are the same in
every run, and all of it in the long form; without a deadline per example."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from long_form import IS_LONG

from mmrouter_lib import native

SHARED = Path(__file__).parents[2].parent / "shared"  # what is recorded of engines and models, beside the repository


def shared_folder(variable: str, name: str) -> Path:
    """Return a folder that an environment variable names, else the one beside the repository; skips without it."""
    folder = Path(os.environ.get(variable, SHARED / name.partition("/")[0])) / name.partition("/")[2]
    if not folder.is_dir():
        pytest.skip(f"not run: no folder {folder} ({variable})")
    return folder


IN_CI = bool(os.environ.get("CI"))
TENTHS = 10 if IS_LONG else 3 if IN_CI else 1


def examples(in_long_form: int) -> int:
    """Return how many examples a property with a number of its own gets, as the default is shared out."""
    return in_long_form * TENTHS // 10


settings.register_profile(
    "mmrouter",
    max_examples=examples(100),
    deadline=None,
    derandomize=IN_CI and not IS_LONG,
    print_blob=IN_CI,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("mmrouter")


@pytest.fixture(scope="module", params=["python", "native"] if native.form == "native" else ["python"])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a module with the Python form of what is native, and with the compiled one where it is installed."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(native, "chain", None)
            patch.setattr(native, "pack_token_ids", None)
            patch.setattr(native, "HolderTable", None)
        yield request.param


@pytest.fixture(scope="module")
def compiled() -> None:
    """Skip where the compiled form is not installed."""
    if native.form != "native":
        pytest.skip(f"not run: {native.why}")
