"""docs/cli.md has every command with every option, and no others."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperArgument, TyperGroup

from mmrouter_cli.app import app

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text()
SECTIONS = dict(re.findall(r"^## mmrouter (\w+)\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL))
GROUP = typer.main.get_command(app)
assert isinstance(GROUP, TyperGroup)
COMMANDS: dict[str, Any] = GROUP.commands


def table(name: str) -> str:
    """The first column of a command's table of options."""
    rows = re.findall(r"^\| (`.*?) \|", SECTIONS[name], re.MULTILINE)
    return "\n".join(rows)


def test_the_page_has_a_section_for_every_command() -> None:
    assert SECTIONS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_section_has_every_argument_and_option_and_no_other(name: str) -> None:
    parameters = [parameter for parameter in COMMANDS[name].params if parameter.name != "help"]
    options = {parameter.opts[0] for parameter in parameters if not isinstance(parameter, TyperArgument)}
    arguments = {parameter.name.upper() for parameter in parameters if isinstance(parameter, TyperArgument)}
    assert set(re.findall(r"`(--[a-z-]+)`", table(name))) == options
    assert set(re.findall(r"`([A-Z_]+)`", table(name))) == arguments
