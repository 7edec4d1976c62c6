"""Recorded SGLang traffic: an excerpt beside this file, and the whole captures where they are installed."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

EXCERPT = Path(__file__).parent / "data" / "sglang.jsonl"
PLACEHOLDER = 403  # of the small vocabulary that the captures were made with


def rows(family: str | None = None) -> list[dict[str, Any]]:
    """The excerpt: family, page_size, case, request, and the payloads that it caused."""
    every = [json.loads(line) for line in EXCERPT.read_text().splitlines()]
    return [row for row in every if family in (None, row["family"])]


def row(family: str, case: str) -> dict[str, Any]:
    return next(row for row in rows(family) if row["case"] == case)


def events(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The engine's events of one row as on the wire."""
    return [event for payload in row["payloads"] for event in msgspec.msgpack.decode(bytes.fromhex(payload))[1]]


def captures() -> Path:
    folder = Path(os.environ.get("MMROUTER_CAPTURES", Path(__file__).parents[4] / "shared" / "captures")) / "sglang"
    if not folder.is_dir():
        pytest.skip(f"not run: no captures at {folder} (MMROUTER_CAPTURES)")
    return folder


def capture_rows(name: str) -> Iterator[dict[str, Any]]:
    for line in (captures() / name).read_text().splitlines():
        yield json.loads(line)
