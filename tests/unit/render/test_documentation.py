"""docs/children.md names what is made, by the names that it has in the code."""

import re
from pathlib import Path

from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render import CHILD_KINDS
from mmrouter_operator.render.autoscaler_choice import METRICS, ROLES

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "children.md").read_text()
TABLES = TEXT.split("\n## ")


def rows(section: str) -> list[list[str]]:
    """The cells of a section's tables, without their heads."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("| ") and not line.startswith(("| kind", "| to ", "| from ", "| `autoscaling.metric"))
    ]


def test_every_kind_of_child_is_documented_and_no_other() -> None:
    documented = {kind for row in rows(TABLES[0]) for kind in row[0].split(", ")}
    assert documented == CHILD_KINDS.keys()


def test_every_metric_of_an_autoscaler_is_documented_with_its_roles() -> None:
    (section,) = (part for part in TABLES if part.startswith("Autoscaling"))
    documented = {
        row[0].strip("`"): (re.findall(r"`(\w+)`", row[1])[0], set(row[2].split(", "))) for row in rows(section)
    }
    assert documented == {metric: (METRICS[metric], set(ROLES[metric])) for metric in METRICS}


def test_the_settings_that_it_names_are_the_operators() -> None:
    known = {field.alias for field in OperatorConfig.model_fields.values()}
    named = set(re.findall(r"^- `(\w+)`:", TEXT, re.MULTILINE))
    assert named
    assert named <= known
