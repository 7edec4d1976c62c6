"""Bodies of requests to the gateway, which has keys of clients but knows no engine.

A body is refused with a 4xx, or goes to a deployment that has the model it names: byte for byte where that is the name
there, else with another model and nothing else changed. All requests of a conversation go to one deployment.
"""

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

import orjson
from campaign.mutation import changed, mutated
from campaign.target import BrokenPropertyError, Target
from unit.router.test_intake_fuzz import CHAT, NAMES, ODD, RESPONSES

from mmrouter_lib.engines.base.passed_routes import TRANSCRIBE
from mmrouter_router.core.errors import RequestError
from mmrouter_router.gateway.config import Target as Split
from mmrouter_router.gateway.model_routes import Deployment, Routes
from mmrouter_router.gateway.requested_model import PATHS, Routed, routed
from mmrouter_router.intake.form_body import Field, read_form, write_form

MAX_BYTES = 1 << 20
MODELS = ("a", "split", "tuned", "gone")
ROUTES = Routes(
    [Deployment(name, name, f"{name}.team.svc", 80) for name in "abc"],
    {
        "split": [Split(deployment="a", weight=3), Split(deployment="b", weight=2)],
        "tuned": [Split(deployment="c", model="adapter")],
        "gone": [Split(deployment="d")],
    },
)
LEADS_TO = {"a": {"a"}, "b": {"b"}, "c": {"c"}, "split": {"a", "b"}, "tuned": {"adapter"}}
"""Model of a request -> its model at the deployment."""
BODIES: tuple[dict[str, Any], ...] = (
    CHAT,
    RESPONSES,
    {"prompt": "a"},
    {"prompt": [1, 2], "prompt_cache_key": "k"},
    {"query": "q", "documents": ["d"]},
)
FIELDS = (Field("model", b"split"), Field("file", b"RIFF\r\n--\0", b"a.wav", b"audio/wav"), Field("language", b"en"))
FORM = b"".join(bytes(piece) for piece in write_form(FIELDS)[1])


class GatewayBodies(Target):
    """An input: a line with the path, then the body."""

    name = "gateway_bodies"
    short = 2000
    words = (
        *(b'"%b":' % word.encode() for word in ("model", "messages", "input", "prompt", "prompt_cache_key", "role")),
        *(b'"%b"' % word.encode() for word in (*MODELS, "user", "system")),
        *b'{|}|[|]|,|"|\\|\\u0000|\\ud800|null|NaN|1e999|18446744073709551616|\xed\xa0\x80'.split(b"|"),
        *(b"--x\r\n", b'content-disposition: form-data; name="model"', b"\r\n\r\n", b"\r\n--", b"--\r\n", b"filename="),
    )

    def seeds(self) -> list[bytes]:
        chats = [path.encode() + b"\n" + json.dumps({**BODIES[0], "model": "split"}).encode() for path in sorted(PATHS)]
        others = [
            b"/v1/responses\n" + json.dumps({**body, "model": name}).encode() for body in BODIES for name in MODELS
        ]
        return [*chats, *others, TRANSCRIBE.encode() + b"\n" + FORM]

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        path, _, raw = source.choice(kept).partition(b"\n")
        if source.random() < 0.5:
            try:
                values = (*ODD, *MODELS)
                return path + b"\n" + json.dumps(changed(source, json.loads(raw), NAMES, values, BODIES)).encode()
            except (ValueError, RecursionError):
                pass
        return path + b"\n" + mutated(source, (raw, raw, source.choice(kept).partition(b"\n")[2]), self.words)

    def check(self, data: bytes) -> str:
        path, _, raw = data.partition(b"\n")
        if path.decode(errors="replace") not in PATHS:
            return "no route"
        try:
            with self.product():
                made = routed(path.decode(), raw, ROUTES, MAX_BYTES)
        except RequestError as error:
            if not 400 <= error.status < 500 and error.code != "no_deployment":
                raise BrokenPropertyError(f"status {error.status}") from error
            return f"{path.decode()} {error.code} {error.param}"
        body = made.body if isinstance(made.body, bytes) else b"".join(map(bytes, made.body))
        name = _check_form(raw, body, made) if path.decode() == TRANSCRIBE else _check_json(raw, body, made)
        if made.choice.model not in LEADS_TO.get(name, ()):
            raise BrokenPropertyError(f"a request for {name!r} goes to {made.choice.model!r}")
        return f"{path.decode()} {name} to {made.choice.model}"


def _check_json(raw: bytes, body: bytes, made: Routed) -> str:
    """Return the model that a body names."""
    read, sent = orjson.loads(raw), orjson.loads(body)
    if made.choice.model == read["model"] and body != raw:
        raise BrokenPropertyError("a body that needs no change was written anew")
    if sent != {**read, "model": made.choice.model}:
        raise BrokenPropertyError("more than the model was changed")
    if _has_a_user(read.get("messages")):
        longer = copy.deepcopy(read)
        longer["messages"].append({"role": "assistant", "content": "more"})
        if routed("/v1/chat/completions", orjson.dumps(longer), ROUTES, MAX_BYTES).choice != made.choice:
            raise BrokenPropertyError("the next turn of a conversation goes to another deployment")
    return str(read["model"])


def _has_a_user(messages: object) -> bool:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return False
    return any(message.get("role") == "user" for message in messages)


def _check_form(raw: bytes, body: bytes, made: Routed) -> str:
    """Return the model that a form names."""
    read, sent = read_form(raw), read_form(body)
    if made.content_type is None and body != raw:
        raise BrokenPropertyError("a form that needs no change was written anew")
    expected = [one._replace(value=made.choice.model.encode()) if one.name == "model" else one for one in read]
    if [one._replace(value=bytes(one.value)) for one in sent] != [
        one._replace(value=bytes(one.value)) for one in (expected if made.content_type else read)
    ]:
        raise BrokenPropertyError("more than the model of a form was changed")
    return next(bytes(one.value).decode(errors="replace") for one in read if one.name == "model")
