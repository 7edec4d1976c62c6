"""`mmrouter crd`: prints the definition, and tells whether a file still holds it."""

from pathlib import Path

import yaml
from typer.testing import CliRunner

from mmrouter_cli.app import app
from mmrouter_lib.api.crd import definition

CRD = Path(__file__).resolve().parents[3] / "crds" / "mmrouter.io_mmrouterdeployments.yaml"


def test_what_is_printed_is_the_definition_and_every_time_the_same() -> None:
    first, second = CliRunner().invoke(app, ["crd"]), CliRunner().invoke(app, ["crd"])
    assert first.exit_code == 0
    assert first.output == second.output
    assert yaml.safe_load(first.output) == definition()


def test_the_file_in_crds_passes_the_check() -> None:
    result = CliRunner().invoke(app, ["crd", "--check", str(CRD)])
    assert (result.exit_code, result.output) == (0, "")


def test_a_file_that_differs_by_a_byte_fails_the_check(tmp_path: Path) -> None:
    file = tmp_path / "crd.yaml"
    file.write_text(CRD.read_text() + "\n")
    result = CliRunner().invoke(app, ["crd", "--check", str(file)])
    assert result.exit_code == 1
    assert f"mmrouter crd > {file}" in result.output


def test_a_file_that_is_not_there_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["crd", "--check", str(tmp_path / "none.yaml")]).exit_code == 2
