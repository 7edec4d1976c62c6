"""The tables of docs/conditions.md: reasons and their status from the operator, meaning and remedy from a YAML file.

``conditions.yaml`` has a line ``Reason: [meaning, what to do]`` for every reason of every condition. Reasons of a
blocked rollout appear on ``Progressing`` as they do on ``Degraded``; the page names them in a sentence.
"""

from pathlib import Path

import yaml

from hack.generators.tables import replaced, table
from mmrouter_operator.status.conditions import BLOCKS, PROGRESSING, REASONS

TEXTS = Path(__file__).with_name("conditions.yaml")
HEADER = ("reason", "status", "meaning", "what to do")


def current(page: str) -> str:
    """Return the page with the tables of every condition. Raises ``ValueError`` where reasons and texts differ."""
    texts = yaml.safe_load(TEXTS.read_text())
    for condition in sorted(texts.keys() | REASONS.keys()):
        reasons, described = REASONS.get(condition, {}), texts.get(condition, {})
        expected = set(reasons) - {*BLOCKS, "ChildRefused"} if condition == PROGRESSING else set(reasons)
        if wrong := expected ^ set(described):
            raise ValueError(f"conditions.yaml and the operator differ in {condition}: {', '.join(sorted(wrong))}")
        body = [(f"`{reason}`", reasons[reason], *words) for reason, words in described.items()]
        page = replaced(page, condition, table(HEADER, body))
    return page
