"""Examines a URL before a run: its model, tokens per word, and whether it is an mmrouter with a known control API."""

import ssl
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import httpx

from mmrouter_cli.bench.chat_stream import ERROR_LENGTH, error_message
from mmrouter_cli.bench.http_client import Client, ConnectError
from mmrouter_cli.bench.types import BenchError, EventState
from mmrouter_cli.bench.workload import VOCABULARY
from mmrouter_cli.status import control_api
from mmrouter_cli.status.control_api import ControlEndpoint, UnreachableError, find_control

FEW_WORDS, MANY_WORDS = 64, 320
"""Lengths of two prompts whose difference is free of the chat template's tokens."""
FOLLOWED_ROLES = ("worker", "prefill")
"""Roles whose engines are chosen by the blocks that they hold."""


Events = tuple[EventState, str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint that answers. ``routed``: an mmrouter; ``control``: its control API, ``why`` it is missing."""

    model: str
    tokens_per_word: float
    routed: bool
    control: ControlEndpoint | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a load is sent, and with which credentials."""

    url: str
    salt: str
    timeout: float
    model: str | None = None
    policy: str | None = None
    encoder_mode: str | None = None
    api_key: str | None = None
    control: str | None = None
    token: str | None = None
    tls: ssl.SSLContext | None = None  # for https; default: the system's trust

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


async def examine(target: Target) -> Endpoint:
    """Examine an endpoint with two short requests. Raises :class:`BenchError` where it does not answer."""
    url, timeout = target.url, target.timeout
    try:
        await Client(url, timeout, target.tls).probe()
        async with httpx.AsyncClient(
            base_url=url, headers=target.headers, timeout=timeout, trust_env=False, verify=target.tls or True
        ) as http:
            model = target.model or await _first_model(http)
            few, _ = await _prompt_tokens(http, model, target.salt, FEW_WORDS)
            many, request_id = await _prompt_tokens(http, model, target.salt, MANY_WORDS)
    except (ConnectError, httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError) as error:
        raise BenchError(f"{url} does not answer: {str(error) or type(error).__name__}") from error
    ratio = max(0.25, (many - few) / (MANY_WORDS - FEW_WORDS)) if many > few else 1.0
    endpoint = Endpoint(model, ratio, bool(request_id), None)
    if not request_id:
        return endpoint
    try:
        control_endpoint = find_control(url, target.control, target.token)
    except UnreachableError as error:
        return replace(endpoint, why=str(error))
    # The token accompanies every request: send it only where that control API knows the endpoint's requests.
    async with control_api.client(control_endpoint.token) as http:
        for each in control_endpoint.controls:
            with suppress(httpx.HTTPError):
                if (await http.get(f"{each}/control/decisions/{request_id}")).status_code == 200:
                    return replace(endpoint, control=control_endpoint)
    urls = ", ".join(control_endpoint.controls)
    return replace(endpoint, why=f"{urls} does not know the requests of {url}, or rejects this token")


async def event_state(endpoint: Endpoint) -> Events:
    """Return whether every engine chosen by its blocks is verified, why not, and the epoch of each engine."""
    epochs: dict[str, str] = {}
    if (control := endpoint.control) is None:
        return "unknown", endpoint.why, epochs
    async with control_api.client(control.token) as http:
        for url in control.controls:
            state = await control_api.fetch(http, control_api.Frontend(url, url))
            if isinstance(state, control_api.Unread):
                return "unknown", f"{url} cannot be queried: {state.why}", epochs
            followed = [row for row in state["workers"] if row["role"] in FOLLOWED_ROLES and not row["draining"]]
            if not followed:
                return "off", f"{url} knows no engine", epochs
            for row in followed:
                if row["standing"] != "verified":
                    return "off", f"{row['name']} is {row['standing']} on {url}, not verified", epochs
                epochs[row["uid"]] = str(row["epoch"])
    return "on", "", epochs


async def encoder_work(endpoint: Endpoint) -> dict[str, tuple[int, int, float]]:
    """Return each encoder's images, visual tokens and busy seconds so far, summed over the frontends."""
    total: dict[str, tuple[int, int, float]] = {}
    if (control := endpoint.control) is None:
        return total
    async with control_api.client(control.token) as http:
        for url in control.controls:
            with suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
                for row in (await http.get(f"{url}/control/encoders")).raise_for_status().json():
                    images, tokens, busy = total.get(row["id"], (0, 0, 0.0))
                    total[row["id"]] = (images + row["images"], tokens + row["tokens"], busy + row["busy_seconds"])
    return total


async def _first_model(http: httpx.AsyncClient) -> str:
    answer = _require_ok(await http.get("/v1/models"))
    try:
        return str(answer.json()["data"][0]["id"])
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise BenchError(f"{answer.url} names no model: give --model") from error


async def _prompt_tokens(http: httpx.AsyncClient, model: str, salt: str, words: int) -> tuple[int, str]:
    """Return the tokens of a prompt of so many words, 0 where not reported, and an mmrouter's request id."""
    text = f"{salt} " + " ".join((VOCABULARY * 2)[:words])
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    answer = _require_ok(await http.post("/v1/chat/completions", json={**body, "temperature": 0}))
    try:
        count = answer.json()["usage"]["prompt_tokens"]
    except (TypeError, KeyError, ValueError):
        count = 0
    return (count if isinstance(count, int) else 0), answer.headers.get("x-mmrouter-request-id", "")


def _require_ok(answer: httpx.Response) -> httpx.Response:
    if answer.status_code == 200:
        return answer
    key = "another key" if "authorization" in answer.request.headers else "a key"
    hint = f" (it wants {key}: --api-key, or OPENAI_API_KEY)" if answer.status_code in (401, 403) else ""
    message = error_message(answer.content)[:ERROR_LENGTH]
    raise BenchError(f"{answer.url} answered {answer.status_code}: {message}{hint}")
