"""The workload of `mmrouter up --demo`: a few requests through the OpenAI API, by policy kv and by round robin."""

import functools
import http.server
import secrets
import ssl
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console

from mmrouter_cli.chat_probe import ChatProbe, ProbeError, expected_cached, reachable_blocks
from mmrouter_cli.options import table
from mmrouter_cli.sample_images import data_uri, picture
from mmrouter_cli.status.control_api import ControlEndpoint

OWN = ssl.create_default_context()
"""Accepts any certificate: the endpoint is a process of the same run."""
OWN.check_hostname, OWN.verify_mode = False, ssl.CERT_NONE
SETTLE_SECONDS = 60.0
"""Longest wait for events, which take milliseconds, or seconds while a small machine computes other things."""
WIDE = 120
"""Columns from which the table has room for the reasons."""
STORY = (
    "The two pictures were taken on one morning from the same window. Please read the question first, look at every "
    "part of what is shown, and answer in one short sentence that names the colours you see from left to right."
)


class Step(NamedTuple):
    """One request of the workload. ``repeats``: the step after which this one must be an exact complete hit."""

    name: str
    messages: tuple[dict[str, Any], ...]
    repeats: str = ""


@dataclass(frozen=True, slots=True)
class StepRow:
    name: str
    worker: str
    blocks: int
    overlap: int
    prompt_tokens: int
    cached_tokens: int
    exactness: str
    why: str
    milliseconds: float
    failure: str = ""


def workload(nonce: str, served: str) -> list[Step]:
    """Return text, one image, the same by ``data:`` and http, two images, the same swapped, a second turn, and repeats.

    ``served`` is the URL below which pictures A.png and B.png lie.
    """
    a, b = picture(nonce + "a"), picture(nonce + "b", 336, 224)

    def desk(number: int) -> dict[str, Any]:
        # Conversations of different desks share no block and may be on different workers.
        return {"role": "system", "content": f"Desk {number} of {nonce}: you answer in one sentence."}

    def ask(*content: Any) -> dict[str, Any]:
        return {"role": "user", "content": list(content)}

    def text(words: str) -> dict[str, Any]:
        return {"type": "text", "text": words}

    def image(url: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": url}}

    words = (desk(1), {"role": "user", "content": STORY})
    single = (desk(2), ask(text(STORY), image(data_uri(a)), text("What is shown?")))
    by_http = (desk(2), ask(text(STORY), image(f"{served}/A.png"), text("What is shown?")))
    pair = (desk(3), ask(image(data_uri(a)), image(data_uri(b)), text(STORY)))
    swapped = (desk(3), ask(image(data_uri(b)), image(data_uri(a)), text(STORY)))
    answer = {"role": "assistant", "content": "Sixteen squares."}
    turn = (*single, answer, ask(text("Which one is the brightest of them?")))
    return [
        Step("text", words),
        Step("text again", words, repeats="text"),
        Step("image, data:", single),
        Step("image, data: again", single, repeats="image, data:"),
        Step("same image, http:", by_http, repeats="image, data:"),
        Step("two images A B", pair),
        Step("two images B A", swapped),
        Step("two images A B again", pair, repeats="two images A B"),
        Step("second turn", turn),
        Step("second turn again", turn, repeats="second turn"),
    ]


@contextmanager
def picture_server(nonce: str) -> Iterator[str]:
    """Serve pictures A.png and B.png on loopback while the block runs; yields the URL."""
    with tempfile.TemporaryDirectory(prefix="mmrouter-demo-") as folder:
        Path(folder, "A.png").write_bytes(picture(nonce + "a"))
        Path(folder, "B.png").write_bytes(picture(nonce + "b", 336, 224))

        class Quiet(http.server.SimpleHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()


@dataclass(frozen=True)
class DemoResult:
    """The workload by the deployment's policy, and by round robin on the same engines."""

    rows: list[StepRow]
    baseline: list[StepRow]

    @property
    def passed(self) -> bool:
        """Whether every repeat was an exact complete hit."""
        return not any(row.failure for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "rows": [asdict(row) for row in self.rows],
            "hit_ratio": hit_ratio(self.rows),
            "round_robin": {"rows": [asdict(row) for row in self.baseline], "hit_ratio": hit_ratio(self.baseline)},
        }


def run(endpoint: ControlEndpoint, model: str) -> DemoResult:
    """Send the workload by the deployment's policy, then by round robin. Raises ``ProbeError``."""
    try:
        return DemoResult(_run(endpoint, model), _run(endpoint, model, policy="roundRobin"))
    except (ProbeError, httpx.HTTPError) as error:
        raise ProbeError(f"the demo's workload failed: {error}") from error


def _run(endpoint: ControlEndpoint, model: str, *, policy: str | None = None) -> list[StepRow]:
    nonce = secrets.token_hex(4)
    rows: list[StepRow] = []
    with picture_server(nonce) as served, httpx.Client(timeout=120, verify=OWN) as client:
        probe = ChatProbe(endpoint, client)
        if policy:
            probe.headers["x-mmrouter-policy"] = policy
        for step in workload(nonce, served):
            body = {"model": model, "messages": step.messages, "max_tokens": 8, "temperature": 0}
            row, reachable = _send(probe, body, step)
            rows.append(row)
            probe.settle(body, reachable, SETTLE_SECONDS)
    return rows


def _send(probe: ChatProbe, body: dict[str, Any], step: Step) -> tuple[StepRow, int]:
    """Return the row of a request, and how many of its blocks a repeat can hit."""
    answer = probe.chat(body)
    usage = answer.json().get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    trace = probe.decision(answer.headers["x-mmrouter-request-id"])
    row = StepRow(
        name=step.name,
        **{field: trace[field] for field in ("worker", "blocks", "overlap", "exactness", "why")},
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=-1 if cached is None else cached,
        milliseconds=answer.elapsed.total_seconds() * 1000,
    )
    reachable = reachable_blocks(row.blocks, int(trace.get("block_size") or 1), row.prompt_tokens)
    return replace(row, failure=repeat_failure(step, row, trace)), reachable


def repeat_failure(step: Step, row: StepRow, trace: dict[str, Any]) -> str:
    """Return why a repeat was not an exact complete hit; empty where it was, or for other steps."""
    if not step.repeats:
        return ""
    if row.exactness != "exact":
        return f"{row.exactness}, not exact: {', '.join(trace.get('reasons', []))}"
    block_size = int(trace["block_size"])
    if row.overlap < reachable_blocks(row.blocks, block_size, row.prompt_tokens):
        return f"{row.overlap} of {row.blocks} blocks"
    expected = expected_cached(row.overlap, block_size, row.prompt_tokens)
    if row.cached_tokens != expected:
        return f"the engine says {row.cached_tokens} cached tokens, predicted {expected}"
    return ""


def hit_ratio(rows: Sequence[StepRow]) -> float:
    """Return the share of prompt tokens that engines served from their caches, a ratio of sums."""
    total = sum(row.prompt_tokens for row in rows)
    return sum(max(row.cached_tokens, 0) for row in rows) / total if total else 0.0


def show(console: Console, result: DemoResult) -> None:
    wide = console.width >= WIDE
    legend = "overlap: blocks that mmrouter predicted to be cached; cached_tokens: what the engine then reports"
    numbers = ("blocks", "overlap", "cached_tokens")
    headings = ("request", "worker", *numbers, "exactness", *(["why"] if wide else []))
    title = "one workload, policy kv"
    shown = table(title, *headings, right=numbers, caption=legend, caption_justify="left")
    for row in result.rows:
        style = "red" if row.failure else None
        why = f"{row.why} [FAIL: {row.failure}]" if row.failure else row.why
        cached = str(row.cached_tokens) if row.cached_tokens >= 0 else "absent"
        whys = [why.replace("[", "\\[")] if wide else []
        shown.add_row(
            row.name, row.worker, str(row.blocks), str(row.overlap), cached, row.exactness, *whys, style=style
        )
    console.print(shown)
    if not wide:
        for row in result.rows:
            if row.failure:
                console.print(f"{row.name}: {row.failure}", style="red", markup=False)
        console.print(f"a terminal of {WIDE} columns also shows reasons, as `mmrouter explain` does")
    ours, theirs = hit_ratio(result.rows), hit_ratio(result.baseline)
    computed = [sum(r.prompt_tokens - max(r.cached_tokens, 0) for r in rows) for rows in (result.rows, result.baseline)]
    console.print(
        f"prompt tokens served from cache: [bold]{ours:.1%}[/bold] by kv, {theirs:.1%} by round robin "
        f"({computed[0]} against {computed[1]} tokens to compute)"
    )
