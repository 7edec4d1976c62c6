"""The table of docs/kv-events.md: answers of consumers to recorded KV events, from what ``check.py --json`` printed."""

import json
from pathlib import Path

from hack.build_once import ROOT
from hack.generators.tables import replaced, table

FIGURES = ROOT / "tests" / "kv_events" / "figures"


def page(text: str, folder: Path = FIGURES) -> str:
    """Return the page with the table. A file of figures is named after its consumer."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    ours = found.pop("mmrouter")
    answers = {
        name: {one["recording"]: f"{one['equal']} / {one['below']} / {one['above']}" for one in results}
        for name, results in {"mmrouter": ours, **found}.items()
    }
    rows = [
        (
            one["engine"],
            one["layout"],
            str(one["requests"]),
            *(answered.get(one["recording"], "-") for answered in answers.values()),
        )
        for one in ours
    ]
    return replaced(text, "kv-events", table(("engine", "layout", "requests", *answers), rows))
