"""The HTTP client of a language engine for its encoders. It is imported late: aiohttp takes a quarter of the start."""

import asyncio
from collections.abc import Iterable
from typing import Any

import aiohttp


async def post_shares(shares: Iterable[tuple[str, dict[str, Any]]]) -> bool:
    """Post every body to its URL at once; return whether all encoders answered 200."""
    async with aiohttp.ClientSession() as session:
        return all(await asyncio.gather(*(_post(session, url, body) for url, body in shares)))


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> bool:
    try:
        async with session.post(url, json=body) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False
