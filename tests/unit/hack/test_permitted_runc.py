"""Docker's runtime for a root that lacks capabilities."""

import json
from pathlib import Path
from typing import Any

import pytest

from hack.kind import permitted_runc


@pytest.mark.parametrize(
    ("arguments", "wrap"),
    [(["--root", "/r", "create", "--bundle", "{}", "name"], "process"), (["exec", "--process", "{}/config.json"], "")],
)
def test_containers_and_commands_in_them_get_what_this_process_has_and_the_rest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], wrap: str
) -> None:
    process: dict[str, Any] = {"cwd": "/", "capabilities": {"bounding": ["CAP_CHOWN", "CAP_BPF"], "ambient": None}}
    spec, config = {wrap: process} if wrap else process, tmp_path / "config.json"
    config.write_text(json.dumps(spec))
    run: list[list[str]] = []
    monkeypatch.setattr("os.execvp", lambda _, argv: run.append(argv))
    monkeypatch.setattr(permitted_runc, "permitted", lambda: {"CAP_CHOWN"})
    argv = ["runc", *(each.format(tmp_path) for each in arguments)]
    monkeypatch.setattr("sys.argv", argv)
    permitted_runc.main()
    process["capabilities"] = {"bounding": ["CAP_CHOWN"], "ambient": []}
    assert (json.loads(config.read_text()), run) == (spec, [argv])
