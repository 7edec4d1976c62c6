"""Hypothesis searches a quarter of its default locally and all of it in CI, without a deadline per example."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from mmrouter_lib import native

if not os.environ.get("CI"):
    settings.register_profile(
        "inner-loop", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("inner-loop")


@pytest.fixture(scope="module", params=["python", "native"] if native.form == "native" else ["python"])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a module with the Python form of the native functions, and with the compiled one where it is installed."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(native, "chain", None)
            patch.setattr(native, "pack_token_ids", None)
        yield request.param


@pytest.fixture(scope="module")
def compiled() -> None:
    """Skip where the compiled form is not installed."""
    if native.form != "native":
        pytest.skip(f"not run: {native.why}")
