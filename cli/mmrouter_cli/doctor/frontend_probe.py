"""Asks frontends how they are doing, twice: what flows is seen by its moving."""

import asyncio
from collections.abc import Sequence

from mmrouter_cli import doctor
from mmrouter_cli.doctor import Diagnosis
from mmrouter_cli.doctor.facts import FrontendFacts, RoutingFacts
from mmrouter_cli.status.control_endpoint import ControlEndpoint
from mmrouter_cli.status.frontend_state import Frontend, Unread, client, fetch

BETWEEN_SECONDS = 1.5
"""Between the two questions to a frontend."""


async def of_frontends(frontends: Sequence[Frontend], token: str, reach: str = "") -> RoutingFacts:
    """Ask each frontend twice. ``reach``: what to do where one cannot be asked."""
    async with client(token) as asking:
        first = await asyncio.gather(*(fetch(asking, frontend) for frontend in frontends))
        if not all(isinstance(answer, Unread) for answer in first):
            await asyncio.sleep(BETWEEN_SECONDS)
        second = await asyncio.gather(
            *(
                _again(answer) if isinstance(answer, Unread) else fetch(asking, frontend)
                for frontend, answer in zip(frontends, first, strict=True)
            )
        )
    asked = zip(frontends, first, second, strict=True)
    facts = tuple(FrontendFacts(frontend.name, before, after) for frontend, before, after in asked)
    return RoutingFacts(facts, BETWEEN_SECONDS, reach) if reach else RoutingFacts(facts, BETWEEN_SECONDS)


async def on_url(reach: ControlEndpoint) -> list[Diagnosis]:
    """Diagnose what can be seen through the control APIs of frontends."""
    frontends = [Frontend(url.removeprefix("http://"), url) for url in reach.controls]
    return [doctor.of_routing(reach.url, await of_frontends(frontends, reach.token))]


async def _again(answer: Unread) -> Unread:
    return answer
