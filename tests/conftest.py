"""Configuration of every level: what costs CPU in every process of tests, and figures that are printed at the end."""

import gc
import os
import ssl
from functools import lru_cache
from typing import Any

import certifi
import pytest
from artefacts import Record
from long_form import leave_out

ROOTS = frozenset({certifi.where(), os.environ.get("SSL_CERT_FILE")})
"""Files that HTTP clients read root certificates from by default."""
FIGURES = pytest.StashKey[dict[str, Any]]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Share one set of root certificates between all HTTP clients of this process.

    A client reads 140 certificates in 20 ms when it is created, even without TLS, and tests create thousands of
    clients: a quarter of the CPU of some levels. A context with its own CA or certificate comes from another file and
    is not shared.
    """
    config.addinivalue_line("markers", "long_form: only part of `make test LONG=1`")
    gc.disable()  # until the tests are collected: what is imported meanwhile stays
    config.stash[FIGURES] = {}
    made = ssl.create_default_context
    shared = lru_cache(made)

    def create(*args: object, **options: object) -> ssl.SSLContext:
        if not args and set(options) == {"cafile"} and options["cafile"] in ROOTS:
            return shared(cafile=options["cafile"])  # type: ignore[arg-type]
        return made(*args, **options)  # type: ignore[arg-type]

    ssl.create_default_context = create


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out(config, items)


def pytest_collection_finish() -> None:
    """Keep modules and collected tests out of collections, as a router does: a sixth of the CPU of unit tests."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[FIGURES]:
        terminalreporter.section("figures")
        for name, value in config.stash[FIGURES].items():
            terminalreporter.write_line(f"{name}: {value}")


@pytest.fixture(scope="session")
def record(pytestconfig: pytest.Config) -> Record:
    """Keep a figure, which is printed at the end."""
    return pytestconfig.stash[FIGURES].__setitem__
