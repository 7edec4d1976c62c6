"""The entry's own words, for who types a container's command."""

import sys

import pytest

from mmrouter_cli.__main__ import WITHOUT_OPTIONS, main


@pytest.mark.parametrize("command", WITHOUT_OPTIONS)
@pytest.mark.parametrize(("option", "status"), [("--help", 0), ("--config=x", 2)])
def test_a_containers_command_says_that_it_takes_no_options(
    command: str, option: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["mmrouter", command, option])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == status
    assert "takes no options" in capsys.readouterr().err
