"""Prints a routing decision: the prediction, every candidate's score, and the evidence per block."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmrouter_cli.options import table

_STREAMS = {
    "repeated": "repeated, because every engine gives the same answer",
    "seeded": "repeated with the seed that the router set",
    "token_ids": "continued from its token ids",
}
"""How a stream is continued; any other value is the code of the reason why not (docs/streams.md)."""


def newest(client: httpx.Client, controls: Sequence[str]) -> tuple[str, str] | None:
    """Return the control API and the id of the newest request of these frontends, ``None`` where none has one.

    Raises ``httpx.HTTPError`` where a frontend does not answer.
    """
    newest_each: list[tuple[float, str, str]] = []
    for control in controls:
        answer = client.get(f"{control}/control/decisions", params={"count": 1}).raise_for_status()
        newest_each += [(trace["at"], control, trace["request_id"]) for trace in answer.json()]
    return max(newest_each)[1:] if newest_each else None


def show(console: Console, trace: dict[str, Any]) -> None:
    """Print a decision."""
    reasons = f" ({', '.join(trace['reasons'])})" if trace["reasons"] else ""
    console.print(
        f"{trace['request_id']}: {trace['worker']} rank {trace['rank']}, {trace['exactness']}{reasons}, policy "
        f"{trace['policy']}; {_prompt(trace)}",
        highlight=False,
    )
    console.print(f"why: {trace['why']}", highlight=False, markup=False)
    if trace.get("regret"):
        given = f"given away: {trace['regret']} blocks more that another worker held, for the load there"
        console.print(given, highlight=False)
    for number, attempt in enumerate(trace["attempts"], 1):
        console.print(f"attempt {number}: {attempt['worker']}: {attempt['outcome']}", highlight=False, markup=False)
    if stream := trace.get("stream"):
        console.print(f"if its engine ends, the stream is {_STREAMS.get(stream, f'not continued: {stream}')}")
    if trace.get("chain") or trace.get("degraded"):
        _stages(console, trace)
    console.print(_candidates(trace))
    for field, drawn in (("images", _images), ("travelled", _travelled), ("keys", _blocks)):
        if trace.get(field):
            console.print(drawn(trace))
    if parity := trace.get("parity"):
        whole = f"the engine holds all {parity.get('blocks')} predicted blocks"
        _compared(console, "parity", parity, whole, parity.get("block"), "published")
    if rendering := trace.get("rendering"):
        whole = f"the same prompt, {rendering.get('tokens')} tokens compared"
        _compared(console, "renderer", rendering, whole, rendering.get("piece"), "rendered")


def _prompt(trace: dict[str, Any]) -> str:
    """Return what was known of the prompt, and when."""
    size = f"{trace['blocks']} blocks of {trace['block_size']} tokens"
    tokens = f"{trace['prompt_tokens']} prompt tokens"
    predicted = trace.get("predicted", "before")
    if predicted == "before":
        more = f", {trace['unproved']} more held that may not be hit" if trace.get("unproved") else ""
        more += f", {trace['tier']} more in lower tiers" if trace.get("tier") else ""
        return f"{trace['overlap']} of {size} held{more}, {tokens}"
    if predicted == "afterwards":
        return f"{size}, {tokens}, predicted only now: holders were not looked up then"
    return "its prompt was not examined and is not kept"


def _stages(console: Console, trace: dict[str, Any]) -> None:
    """Print the engines of each stage with their times, and the stages that were skipped."""
    if trace["degraded"]:
        console.print(f"served without: {', '.join(trace['degraded'])}", highlight=False, markup=False)
    shown = table(f"stages, of the form {trace['form']}", "stage", "outcome", "engines", "ms", "of it", right=("ms",))
    for note in trace["chain"]:
        part = ""
        if "images" in note:
            part = f"{note['images']} images, {note['tokens']} visual tokens"
        elif "remaining_tokens" in note:
            part = f"{note['remaining_tokens']} tokens that the answering engine lacked"
        seconds = f"{note['seconds'] * 1e3:.1f}" if note["seconds"] else ""
        shown.add_row(note["stage"], note["outcome"], ", ".join(note["workers"]), seconds, part)
    console.print(shown)


def _compared(
    console: Console, who: str, outcome: dict[str, Any], whole: str, place: dict[str, Any] | None, other: str
) -> None:
    """Print ``whole`` where ``who`` has what was predicted, else both sides of the first difference."""
    if outcome["result"] == "True":
        console.print(f"{who}: {whole}", highlight=False)
        return
    cause = f" ({outcome['cause']})" if outcome["cause"] else ""
    console.print(f"{who}: {outcome['result']}{cause}: {outcome['message']}", highlight=False, markup=False)
    if place is None:
        return
    block = f"block {place['number']}, " if "number" in place else ""
    shown = table(f"{block}from token {place['first_token']}", "", "predicted", other)
    sides = (place["predicted"], place[other])
    shown.add_row("text", *(Text(side["text"]) for side in sides))
    shown.add_row("tokens", *(Text(" ".join(map(str, side["tokens"]))) for side in sides))
    named = ("\n".join(f"{i['identity'][:19]}... at {i['starts_at']}" for i in side["images"]) for side in sides)
    shown.add_row("images", *(Text(text or "none") for text in named))
    console.print(shown)


def error_text(answer: httpx.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return f"the control API answered {answer.status_code}: {answer.text[:300]}"
    error = body.get("error")
    if isinstance(error, dict):
        param = error.get("param")
        return f"{param}: {error.get('message')}" if param else str(error.get("message"))
    return f"{answer.status_code}: {body.get('detail', body)}"


def _candidates(trace: dict[str, Any]) -> Table:
    """Return every candidate's score; terms that are 0 for all are named in the caption."""
    candidates = trace["candidates"]
    every = sorted({term for candidate in candidates for term in candidate["terms"]})
    terms = [term for term in every if any(candidate["terms"].get(term) for candidate in candidates)]
    left_out = [term for term in every if term not in terms]
    caption = Text(f"0 for all: {', '.join(left_out)}") if left_out else None
    columns = {"unproved": "not proved", "tier": "lower tiers"}
    beyond = [name for name in columns if any(candidate.get(name) for candidate in candidates)]
    numbers = ("overlap", *map(columns.get, beyond), "in cache", *terms, "cost")
    title = "candidates, best first"
    shown = table(title, "worker", *numbers, right=numbers, caption=caption, caption_justify="left")
    for candidate in candidates:
        name = candidate["worker"] if candidate["scored"] else f"{candidate['worker']} (not verified)"
        values = [f"{candidate['terms'].get(term, 0):g}" for term in terms]
        overlap = str(candidate["overlap"]) if trace.get("predicted", "before") == "before" else "-"
        more = [str(candidate[each]) for each in beyond]
        shown.add_row(name, overlap, *more, str(candidate["held"]), *values, f"{candidate['cost']:g}")
    return shown


def _images(trace: dict[str, Any]) -> Table:
    title = f"images, named by {trace['identity']['provider']} ({trace['identity']['why']})"
    shown = table(title, "part", "size", "tokens", "first token", "identity")
    for image in trace["images"]:
        numbers = (f"{image['width']}x{image['height']}", str(image["tokens"]), str(image["offset"]))
        shown.add_row(image["param"], *numbers, image["identity"][:19] + "...")
    return shown


def _travelled(trace: dict[str, Any]) -> Table:
    """Return how each image reached each engine, and why not by another way."""
    headings = ("identity", "to", "how", "bytes", "ms", "instead of")
    shown = table("how images travelled", *headings, right=("bytes", "ms"))
    for transfer in trace["travelled"]:
        others = ", ".join(f"{other['how']} ({other['reason']})" for other in transfer["instead_of"])
        where = (transfer["identity"][:19] + "...", transfer["engine"], transfer["how"])
        shown.add_row(*where, str(transfer["bytes"]), f"{transfer['seconds'] * 1e3:.1f}", others)
    return shown


def _blocks(trace: dict[str, Any]) -> Table:
    """Return runs of blocks with the same holders."""
    shown = table("blocks and who holds them now", "blocks", "first key", "held by", "images")
    size = trace["block_size"]
    rows = list(enumerate(zip(trace["keys"], trace["holders_now"], strict=True)))
    for holders, group in groupby(rows, key=lambda row: row[1][1]):
        run = list(group)
        first, last = run[0][0], run[-1][0]
        inside = [
            image["param"]
            for image in trace["images"]
            if image["offset"] < (last + 1) * size and image["offset"] + image["tokens"] > first * size
        ]
        span = f"{first}" if first == last else f"{first}-{last}"
        shown.add_row(span, run[0][1][0], ", ".join(holders) or "none", ", ".join(inside))
    return shown
