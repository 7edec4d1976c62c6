"""`mmrouter ui`: the addresses of the live page (docs/ui.md), one per frontend, with the control token.

The token is in the part of an address that browsers send to no server, and the page removes it from there.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from mmrouter_cli.status.control_api import ControlEndpoint, Frontend, Unread, client, fetch, open_frontends

PATH = "/ui/"


class Page(NamedTuple):
    """One frontend's page: its address, or why it has none."""

    frontend: str
    address: str | Unread


def address(control: str, token: str) -> str:
    """Return the address of a frontend's page; ``control``: the URL of its control API."""
    return f"{control}{PATH}#token={quote(token, safe='')}"


async def of_endpoint(endpoint: ControlEndpoint) -> list[Page]:
    return await _pages([Frontend(url.removeprefix("http://"), url) for url in endpoint.controls], endpoint.token)


@asynccontextmanager
async def of_cluster(
    name: str, namespace: str | None, kubeconfig: Path | None, token: str | None
) -> AsyncIterator[list[Page]]:
    """Make the frontends of a deployment reachable until the end of the block.

    Raises ``ClusterError`` where the cluster, the deployment or its token cannot be read.
    """
    from mmrouter_cli.cluster.reader import ClusterError, namespace_of, reading
    from mmrouter_cli.doctor.diagnose import control_token, is_frontend
    from mmrouter_operator.cluster.operator_kinds import KINDS
    from mmrouter_operator.model.kinds import DEPLOYMENT_LABEL

    namespace = namespace or namespace_of(kubeconfig)
    async with reading(kubeconfig) as reader:
        mine = await reader.items(KINDS["Pod"].path(namespace), labelSelector=f"{DEPLOYMENT_LABEL}={name}")
        pods = [pod for pod in mine if is_frontend(pod)]
        if not pods:
            raise ClusterError(f"no frontend of a deployment {name} runs in namespace {namespace}")
        token = token or await control_token(reader, namespace, name)
    async with open_frontends(pods, kubeconfig) as frontends:
        yield await _pages(frontends, token)


async def _pages(frontends: Sequence[Frontend], token: str) -> list[Page]:
    """Return the pages of the frontends that answer with this token."""
    async with client(token) as asking:
        answers = await asyncio.gather(*(fetch(asking, frontend) for frontend in frontends))
    pages = []
    for frontend, answer in zip(frontends, answers, strict=True):
        control = answer if isinstance(answer, Unread) else frontend.url
        pages.append(Page(frontend.name, control if isinstance(control, Unread) else address(control, token)))
    return pages
