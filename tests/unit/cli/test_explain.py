"""What `mmrouter explain` prints of a comparison: what differs, as both sides have it."""

import io

import httpx
from rich.console import Console

from mmrouter_cli.explain import error_text, show

TRACE = {
    "request_id": "r-1",
    "worker": "w",
    "rank": 0,
    "exactness": "exact",
    "reasons": [],
    "policy": "kv",
    "overlap": 0,
    "blocks": 0,
    "block_size": 16,
    "prompt_tokens": 3,
    "why": "the only one",
    "attempts": [],
    "candidates": [],
    "images": [],
    "keys": [],
    "holders_now": [],
}


def printed(width: int = 160, **fields) -> str:
    file = io.StringIO()
    show(Console(file=file, width=width), TRACE | fields)
    return file.getvalue()


def side(text: str, *tokens: int) -> dict:
    return {"text": text, "tokens": list(tokens), "images": []}


def test_a_rendering_that_differs_is_shown_as_both_sides_have_it():
    piece = {"first_token": 7, "predicted": side("Hello [x]", 1, 2), "rendered": side("Hi", 3)}
    rendering = {"result": "False", "cause": "template", "tokens": 9, "message": "token 8: [here]", "piece": piece}
    out = printed(parity=None, rendering=rendering)
    assert "renderer: False (template): token 8: [here]" in out
    assert all(said in out for said in ("from token 7", "rendered", "Hello [x]", "1 2", "Hi"))


def test_a_rendering_that_agrees_or_failed_is_one_line():
    assert "the same prompt, 9 tokens compared" in printed(rendering={"result": "True", "cause": "", "tokens": 9})
    lost = {"result": "Unknown", "cause": "renderer_lost", "tokens": 0, "message": "gone"}
    assert "renderer: Unknown (renderer_lost): gone" in printed(rendering=lost)
    assert "renderer" not in printed(rendering=None)


def test_a_block_that_differs_is_shown_as_both_sides_have_it():
    block = {"number": 2, "first_token": 32, "predicted": side("a", 1), "published": side("b", 2)}
    parity = {"result": "False", "cause": "count", "blocks": 3, "message": "said", "block": block}
    out = printed(parity=parity)
    assert all(said in out for said in ("parity: False (count): said", "block 2, from token 32", "published"))


def candidate(worker: str, **terms: float) -> dict:
    return {"worker": worker, "scored": True, "overlap": 0, "held": 16, "terms": terms, "cost": sum(terms.values())}


def test_a_terminal_of_80_columns_shows_a_pods_whole_name_and_no_column_of_nothing_but_zeros():
    names = [f"demo-worker-7f68747fc5-lh5f{number}" for number in range(2)]
    terms = [{"compute": 6, "decode": 0, "queue": 0}, {"compute": 6, "decode": 0, "queue": 12}]
    out = printed(80, candidates=[candidate(name, **one) for name, one in zip(names, terms, strict=True)])
    assert all(f"│ {name} │" in out for name in names)
    head = next(line for line in out.splitlines() if "worker" in line and "┃" in line)
    assert "queue" in head
    assert "decode" not in head
    assert "0 for all: decode" in out


def test_a_refusal_is_shown_with_its_field():
    def refusal(param: str | None) -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": "No.", "param": param}})

    assert error_text(refusal("messages")) == "messages: No."
    assert error_text(refusal(None)) == "No."
