"""The table of docs/kv-events.md: answers of consumers to recorded KV events, from what ``check.py --json`` printed."""

import json
from pathlib import Path

from hack.build_once import ROOT
from hack.generators.tables import replaced, table

FIGURES = ROOT / "tests" / "kv_events" / "figures"


def page(text: str, folder: Path = FIGURES) -> str:
    """Return the page with the table. A file of figures is named after its consumer."""
    results_of = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    ours = results_of.pop("mmrouter")
    answers = {
        name: {result["recording"]: f"{result['equal']} / {result['below']} / {result['above']}" for result in results}
        for name, results in {"mmrouter": ours, **results_of}.items()
    }
    rows = [
        (
            result["engine"],
            result["layout"],
            str(result["requests"]),
            *(answered.get(result["recording"], "-") for answered in answers.values()),
        )
        for result in ours
    ]
    return replaced(text, "kv-events", table(("engine", "layout", "requests", *answers), rows))
