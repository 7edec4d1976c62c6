"""The table of conditions, and the document that people read."""

import re
from pathlib import Path

import pytest

from mmrouter_operator.model import problems
from mmrouter_operator.model.external_refs import EXTERNAL_KINDS
from mmrouter_operator.status import conditions as c

DOCUMENT = Path(__file__).parents[3] / "docs" / "conditions.md"
ROW = re.compile(r"^\| `(\w+)` \| (True|False|Unknown) \| (.+) \| (.+) \|$")


def documented() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    section = ""
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
            found[section] = {}
        elif row := ROW.match(line):
            assert row[1] not in found[section], f"{section} {row[1]} is there twice"
            found[section][row[1]] = row[2]
    return found


def test_the_document_has_every_condition_and_reason_and_no_other() -> None:
    told = documented()
    blocking = (
        DOCUMENT.read_text().partition("Every other reason is one that blocks")[2].partition(" They are False")[0]
    )
    told[c.PROGRESSING] |= dict.fromkeys(set(re.findall(r"`(\w+)`", blocking)) - {c.DEGRADED}, "False")
    assert told == {type_: dict(reasons) for type_, reasons in c.REASONS.items()}


def test_every_problem_of_writing_children_is_a_reason_of_degraded() -> None:
    reasons = [value for name, value in vars(problems).items() if name.isupper() and isinstance(value, str)]
    assert len(reasons) >= 5
    assert set(reasons) <= c.REASONS[c.DEGRADED].keys()


def test_every_kind_that_a_resource_can_name_has_a_reason_for_its_absence() -> None:
    assert set(c.MISSING) == set(EXTERNAL_KINDS)


def test_a_reason_that_the_table_lacks_is_no_condition() -> None:
    with pytest.raises(KeyError):
        c.condition(c.READY, "Sunshine", "")


def test_reasons_are_words_that_the_api_takes() -> None:
    for type_, reasons in c.REASONS.items():
        for reason in [type_, *reasons]:
            assert re.fullmatch(r"[A-Z][A-Za-z0-9]*", reason)
