"""Prints a routing decision: the prediction, every candidate's score, and the evidence per block."""

from itertools import groupby
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text


def show(console: Console, trace: dict[str, Any]) -> None:
    """Print a decision."""
    reasons = f" ({', '.join(trace['reasons'])})" if trace["reasons"] else ""
    console.print(
        f"{trace['request_id']}: {trace['worker']} rank {trace['rank']}, {trace['exactness']}{reasons}, policy "
        f"{trace['policy']}; {_prompt(trace)}",
        highlight=False,
    )
    console.print(f"why: {trace['why']}", highlight=False, markup=False)
    for number, attempt in enumerate(trace["attempts"], 1):
        console.print(f"attempt {number}: {attempt['worker']}: {attempt['outcome']}", highlight=False, markup=False)
    if trace.get("chain") or trace.get("degraded"):
        _stages(console, trace)
    console.print(_candidates(trace))
    if trace["images"]:
        console.print(_images(trace))
    if trace.get("travelled"):
        console.print(_travelled(trace))
    if trace["keys"]:
        console.print(_blocks(trace))
    if trace.get("parity"):
        _parity(console, trace["parity"])
    if trace.get("rendering"):
        _rendering(console, trace["rendering"])


def _prompt(trace: dict[str, Any]) -> str:
    """Return what was known of the prompt, and when."""
    size, tokens = (
        f"{trace['blocks']} blocks of {trace['block_size']} tokens",
        f"{trace['prompt_tokens']} prompt tokens",
    )
    predicted = trace.get("predicted", "before")
    if predicted == "before":
        return f"{trace['overlap']} of {size} held, {tokens}"
    if predicted == "afterwards":
        return f"{size}, {tokens}, predicted only now: holders were not looked up then"
    return "its prompt was not examined and is not kept"


def _stages(console: Console, trace: dict[str, Any]) -> None:
    """Print the engines of each stage with their times, and the stages that were skipped."""
    if trace["degraded"]:
        console.print(f"served without: {', '.join(trace['degraded'])}", highlight=False, markup=False)
    table = Table(title=f"stages, of the form {trace['form']}")
    for heading in ("stage", "outcome", "engines", "ms", "of it"):
        table.add_column(heading, justify="right" if heading == "ms" else "left", overflow="fold")
    for note in trace["chain"]:
        part = ""
        if "images" in note:
            part = f"{note['images']} images, {note['tokens']} visual tokens"
        elif "remaining_tokens" in note:
            part = f"{note['remaining_tokens']} tokens that the answering engine lacked"
        seconds = f"{note['seconds'] * 1e3:.1f}" if note["seconds"] else ""
        table.add_row(note["stage"], note["outcome"], ", ".join(note["workers"]), seconds, part)
    console.print(table)


def _parity(console: Console, parity: dict[str, Any]) -> None:
    """Print whether the engine's blocks equal the prediction, or both sides of the first difference."""
    if parity["result"] == "True":
        console.print(f"parity: the engine holds all {parity['blocks']} predicted blocks", highlight=False)
        return
    cause = f" ({parity['cause']})" if parity["cause"] else ""
    console.print(f"parity: {parity['result']}{cause}: {parity['message']}", highlight=False, markup=False)
    block = parity.get("block")
    if block is None:
        return
    console.print(_sides(f"block {block['number']}, from token {block['first_token']}", block, "published"))


def _rendering(console: Console, rendering: dict[str, Any]) -> None:
    """Print whether a renderer's prompt equals the prediction, or both sides of the first difference."""
    if rendering["result"] == "True":
        console.print(f"renderer: the same prompt, {rendering['tokens']} tokens compared", highlight=False)
        return
    result = f"renderer: {rendering['result']} ({rendering['cause']}): {rendering['message']}"
    console.print(result, highlight=False, markup=False)
    piece = rendering.get("piece")
    if piece is not None:
        console.print(_sides(f"from token {piece['first_token']}", piece, "rendered"))


def _sides(title: str, place: dict[str, Any], other: str) -> Table:
    table = Table(title=title)
    for heading in ("", "predicted", other):
        table.add_column(heading, overflow="fold")
    sides = (place["predicted"], place[other])
    table.add_row("text", *(Text(side["text"]) for side in sides))
    table.add_row("tokens", *(Text(" ".join(map(str, side["tokens"]))) for side in sides))
    named = ("\n".join(f"{i['identity'][:19]}... at {i['starts_at']}" for i in side["images"]) for side in sides)
    table.add_row("images", *(Text(text or "none") for text in named))
    return table


def error_text(answer: httpx.Response) -> str:
    """Return the message of a refusal."""
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
    table = Table(title="candidates, best first", caption=caption, caption_justify="left")
    table.add_column("worker", overflow="fold")
    for heading in ("overlap", "in cache", *terms, "cost"):
        table.add_column(heading, justify="right", overflow="fold")
    for candidate in candidates:
        name = candidate["worker"] if candidate["scored"] else f"{candidate['worker']} (not verified)"
        values = [f"{candidate['terms'].get(term, 0):g}" for term in terms]
        overlap = str(candidate["overlap"]) if trace.get("predicted", "before") == "before" else "-"
        table.add_row(name, overlap, str(candidate["held"]), *values, f"{candidate['cost']:g}")
    return table


def _images(trace: dict[str, Any]) -> Table:
    table = Table(title=f"images, named by {trace['identity']['provider']} ({trace['identity']['why']})")
    for heading in ("part", "size", "tokens", "first token", "identity"):
        table.add_column(heading, overflow="fold")
    for image in trace["images"]:
        size = f"{image['width']}x{image['height']}"
        identity = image["identity"][:19] + "..."
        table.add_row(image["param"], size, str(image["tokens"]), str(image["offset"]), identity)
    return table


def _travelled(trace: dict[str, Any]) -> Table:
    """Return how each image reached each engine, and why not by another way."""
    table = Table(title="how images travelled")
    for heading in ("identity", "to", "how", "bytes", "ms", "instead of"):
        table.add_column(heading, justify="right" if heading in ("bytes", "ms") else "left", overflow="fold")
    for transfer in trace["travelled"]:
        others = ", ".join(f"{other['how']} ({other['reason']})" for other in transfer["instead_of"])
        shown = (transfer["identity"][:19] + "...", transfer["engine"], transfer["how"], str(transfer["bytes"]))
        table.add_row(*shown, f"{transfer['seconds'] * 1e3:.1f}", others)
    return table


def _blocks(trace: dict[str, Any]) -> Table:
    """Return runs of blocks with the same holders."""
    table = Table(title="blocks and who holds them now")
    for heading in ("blocks", "first key", "held by", "images"):
        table.add_column(heading, overflow="fold")
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
        table.add_row(span, run[0][1][0], ", ".join(holders) or "none", ", ".join(inside))
    return table
