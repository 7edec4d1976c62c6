"""The engines that run without a model, each in one process for all files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance.nomodel.layouts import (
    SglangHybridProcess,
    SglangProcess,
    VllmProcess,
    running,
    running_sglang,
    running_sglang_hybrids,
)


@pytest.fixture(scope="session")
def engine(vllm_env: Path) -> Iterator[VllmProcess]:
    with running(vllm_env) as started:
        yield started


@pytest.fixture(scope="session")
def newer_engine(newer_vllm_env: Path) -> Iterator[VllmProcess]:
    with running(newer_vllm_env) as started:
        yield started


@pytest.fixture(scope="session")
def sglang_engine(sglang_env: Path) -> Iterator[SglangProcess]:
    with running_sglang(sglang_env) as started:
        yield started


@pytest.fixture(scope="session")
def sglang_hybrid_engine(sglang_env: Path) -> Iterator[SglangHybridProcess]:
    with running_sglang_hybrids(sglang_env) as started:
        yield started
