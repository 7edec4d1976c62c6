"""What stands at a URL: its model, its tokenizer's tokens per word, and whether an mmrouter and its control API do."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import aiohttp
import httpx

from mmrouter_cli.bench.content import VOCABULARY
from mmrouter_cli.bench.request import unconnected, whole
from mmrouter_cli.bench.types import BenchError, Events
from mmrouter_cli.status import frontend_state as states
from mmrouter_cli.status.control_endpoint import Reach, UnreachableError, reach

FEW, MANY = 64, 320
"""Words of the two prompts that are compared; what the template adds is the same in both."""
FOLLOWED = ("worker", "prefill")
"""Roles that are chosen by what they hold."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint that answers. ``routed``: an mmrouter; ``reach``: its control API, where that is known."""

    url: str
    model: str
    tokens_per_word: float
    routed: bool
    reach: Reach | None
    why: str = ""
    """Why there is no control API."""


async def find(
    client: aiohttp.ClientSession,
    url: str,
    headers: Mapping[str, str],
    *,
    model: str | None,
    salt: str,
    control: str | None,
    token: str | None,
) -> Endpoint:
    """Look at an endpoint, with two short requests. Raises :class:`BenchError` where it does not answer."""
    try:
        model = model or await _model(client, url, headers)
        few, _ = await _prompt_tokens(client, url, headers, model, salt, FEW)
        many, request_id = await _prompt_tokens(client, url, headers, model, salt, MANY)
    except aiohttp.ClientConnectorError as error:
        raise BenchError(f"{url} does not answer: {unconnected(error)}") from error
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise BenchError(f"{url} does not answer: {error or type(error).__name__}") from error
    found = Endpoint(url, model, max(0.25, (many - few) / (MANY - FEW)) if many > few else 1.0, bool(request_id), None)
    if not request_id:
        return found
    try:
        way = reach(url, control, token)
    except UnreachableError as error:
        return replace(found, why=str(error))
    # The token goes to the endpoint with every request: only to one whose requests that control API knows.
    async with states.client(way.token) as asking:
        for each in way.controls:
            if await _knows(asking, each, request_id):
                return replace(found, reach=way)
    return replace(found, why=f"{', '.join(way.controls)} does not know the requests of {url}, or not this token")


async def events(way: Reach) -> tuple[Events, str, dict[str, str]]:
    """Return whether every engine that is chosen by what it holds is proved now, why not, and each one's epoch."""
    epochs: dict[str, str] = {}
    async with states.client(way.token) as asking:
        for control in way.controls:
            said = await states.ask(asking, states.Frontend(control, control))
            if isinstance(said, states.Unread):
                return "unknown", f"{control} cannot be asked: {said.why}", epochs
            followed = [row for row in said["workers"] if row["role"] in FOLLOWED and not row["draining"]]
            if not followed:
                return "off", f"{control} knows no engine", epochs
            for row in followed:
                if row["standing"] != "verified":
                    return "off", f"{row['name']} is {row['standing']} on {control}, not verified", epochs
                epochs[row["uid"]] = str(row["epoch"])
    return "on", "", epochs


def _refusal(url: str, status: int, said: str, headers: Mapping[str, str]) -> str:
    wrong = "another key" if "authorization" in headers else "a key"
    hint = f" (it wants {wrong}: --api-key, or OPENAI_API_KEY)" if status in (401, 403) else ""
    return f"{url} answered {status}: {said}{hint}"


async def _knows(asking: httpx.AsyncClient, control: str, request_id: str) -> bool:
    try:
        return (await asking.get(f"{control}/control/decisions/{request_id}")).status_code == 200
    except httpx.HTTPError:
        return False


async def _model(client: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> str:
    status, value, said, _ = await whole(client, "GET", f"{url}/v1/models", headers=headers)
    if status != 200:
        raise BenchError(_refusal(f"{url}/v1/models", status, said, headers))
    try:
        return str(value["data"][0]["id"])
    except (TypeError, KeyError, IndexError) as error:
        raise BenchError(f"{url}/v1/models names no model: give --model") from error


async def _prompt_tokens(
    client: aiohttp.ClientSession, url: str, headers: Mapping[str, str], model: str, salt: str, words: int
) -> tuple[int, str]:
    """Return how many tokens a prompt of so many words is, 0 where nobody says, and an mmrouter's id of the request."""
    text = f"{salt} " + " ".join((VOCABULARY * 2)[:words])
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}
    status, value, said, request_id = await whole(
        client, "POST", f"{url}/v1/chat/completions", headers=headers, json=body
    )
    if status != 200:
        raise BenchError(_refusal(url, status, said, headers))
    usage = value.get("usage") if isinstance(value, dict) else None
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return (count if isinstance(count, int) else 0), request_id
