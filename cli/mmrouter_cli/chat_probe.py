"""Requests of `verify` and `up --demo`: a chat, the decision on it, and the wait until frontends know its blocks."""

import time
from typing import Any

import httpx

from mmrouter_cli.status.control_api import ControlEndpoint

SETTLE_STEP_SECONDS = 0.02


class ProbeError(Exception):
    """A request cannot be sent or its answer cannot be used."""


class ChatProbe:
    """Sends chats to a deployment, which shows its decisions to the control token, and asks frontends about them."""

    def __init__(self, endpoint: ControlEndpoint, client: httpx.Client, *, api_key: str | None = None) -> None:
        self.endpoint, self._client = endpoint, client
        self.headers = {"x-mmrouter-control": endpoint.token}
        self._control_headers = endpoint.authorization
        if api_key:
            self._control_headers["x-mmrouter-api-key"] = api_key
            self.headers["authorization"] = f"Bearer {api_key}"

    def served_model(self) -> str:
        """Return the id of the first model. Raises :class:`ProbeError`."""
        answer = self._client.get(f"{self.endpoint.url}/v1/models", headers=self.headers)
        return str(_accepted(answer).json()["data"][0]["id"])

    def chat(self, body: dict[str, Any]) -> httpx.Response:
        """Return the answer to a chat. Raises :class:`ProbeError`."""
        url = f"{self.endpoint.url}/v1/chat/completions"
        return _accepted(self._client.post(url, headers=self.headers, json=body))

    def states(self) -> list[dict[str, Any]]:
        """Return the state of every frontend. Raises :class:`ProbeError`."""
        urls = (f"{control}/control/state" for control in self.endpoint.controls)
        return [_accepted(self._client.get(url, headers=self._control_headers)).json() for url in urls]

    def decision(self, request_id: str) -> dict[str, Any]:
        """Return the decision on a request. Raises :class:`ProbeError` where no frontend knows it."""
        for control in self.endpoint.controls:
            answer = self._client.get(f"{control}/control/decisions/{request_id}", headers=self._control_headers)
            if answer.status_code == 200:
                decision: dict[str, Any] = answer.json()
                return decision
        raise ProbeError(f"no frontend knows decision {request_id}")

    def settle(self, body: dict[str, Any], blocks: int, limit_s: float) -> None:
        """Wait until every frontend finds as many blocks of a chat in the cache of an engine, at most ``limit_s``."""
        deadline = time.monotonic() + limit_s
        for control in self.endpoint.controls:
            while time.monotonic() < deadline:
                dry = self._client.post(f"{control}/control/explain", headers=self._control_headers, json=body)
                if dry.status_code == 200 and any(c["overlap"] >= blocks for c in dry.json()["candidates"]):
                    break
                time.sleep(SETTLE_STEP_SECONDS)


def refusal_message(answer: httpx.Response) -> str:
    """Return the message of a refusal, with a hint for a missing key."""
    try:
        text = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = answer.text[:300]
    return f"{text} (it wants a client's key: --api-key, or OPENAI_API_KEY)" if answer.status_code == 401 else text


def _accepted(answer: httpx.Response) -> httpx.Response:
    if answer.status_code != 200:
        raise ProbeError(f"{answer.request.url} answered {answer.status_code}: {refusal_message(answer)}")
    return answer


def reachable_blocks(blocks: int, block_size: int, prompt_tokens: int) -> int:
    """Return how many blocks of a prompt a repeat can hit: an engine always computes the last token.

    So the last block of a prompt of whole blocks is never served. Engines whose model has a sliding window do not even
    keep it (docs/engine-facts/vllm.md#sliding-windows).
    """
    return min(blocks, (prompt_tokens - 1) // block_size)


def expected_cached(blocks: int, block_size: int, prompt_tokens: int) -> int:
    """Return ``cached_tokens`` for so many held blocks."""
    return reachable_blocks(blocks, block_size, prompt_tokens) * block_size
