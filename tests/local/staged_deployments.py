"""Deployments whose engines work in stages: the example that a test runs, and what was decided of a request."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from local.rig import ROOT, Deployment, running
from scenarios import Chat

MEDIA = {"fetch": "allowList", "allowedHosts": ["127.0.0.1"], "allowedCIDRs": ["127.0.0.0/8"]}


@contextmanager
def started(example: str, folder: Path, **routing: Any) -> Iterator[Deployment]:
    """Run an example with one frontend, which fetches images from this machine; ``routing`` is said beside that."""
    body = yaml.safe_load((ROOT / "examples" / example).read_text())
    spec = body["spec"]
    spec["model"]["volume"]["hostPath"]["path"] = str(ROOT / "examples" / "models" / "tiny-qwen2-vl")
    spec["frontend"]["replicas"] = 1
    spec["routing"] = {**routing, "media": MEDIA}
    file = folder / example
    file.write_text(yaml.safe_dump(body))
    with running(file) as deployment:
        yield deployment


def decided(deployment: Deployment, chat: Chat, *content: str) -> dict[str, Any]:
    """Send a chat and return its decision."""
    raw = chat.client.chat.completions.with_raw_response.create(
        model="demo", messages=chat.messages(*content), max_tokens=4, temperature=0
    )
    assert raw.parse().choices[0].message.content
    return deployment.decision(raw)
