"""Kubernetes' probes, as far as pods of ours use them: httpGet, tcpSocket and exec."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from mmrouter_cli.local.folders import LocalError


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe; times are seconds. Exactly one of ``http_path``, ``tcp`` and ``command`` says what is tried."""

    http_path: str | None
    tcp: bool
    command: tuple[str, ...] | None
    port: int | str
    host: str
    headers: dict[str, str]
    scheme: str
    delay: float
    period: float
    timeout: float
    failures: int
    successes: int


def parse_probe(obj: Mapping[str, Any] | None, where: str) -> Probe | None:
    """Read a probe; ``None`` stays ``None``. Raises :class:`LocalError` for a kind that is not supported."""
    if not obj:
        return None
    http, tcp, execute = obj.get("httpGet"), obj.get("tcpSocket"), obj.get("exec")
    if sum(part is not None for part in (http, tcp, execute)) != 1:
        raise LocalError(f"{where} needs exactly one of httpGet, tcpSocket and exec")
    target = http or tcp or {}
    return Probe(
        http_path=http.get("path", "/") if http is not None else None,
        tcp=tcp is not None,
        command=tuple(execute["command"]) if execute is not None else None,
        port=target.get("port", 0),
        host=target.get("host", ""),
        headers={h["name"]: h["value"] for h in target.get("httpHeaders") or []},
        scheme=target.get("scheme", "HTTP").lower(),
        delay=float(obj.get("initialDelaySeconds", 0)),
        period=float(obj.get("periodSeconds", 10)),
        timeout=float(obj.get("timeoutSeconds", 1)),
        failures=int(obj.get("failureThreshold", 3)),
        successes=int(obj.get("successThreshold", 1)),
    )


@dataclass(frozen=True, slots=True)
class Target:
    """What a probe is made against: a pod's address, its ports by name, and how a command is run in the container."""

    ip: str
    ports: Mapping[str, int]
    env: Mapping[str, str]
    folder: str
    session: aiohttp.ClientSession


async def attempt(probe: Probe, target: Target, argv: Sequence[str] | None = None) -> str | None:
    """Try once. Returns ``None`` for success, otherwise what went wrong. ``argv`` is the command of an exec probe."""
    try:
        async with asyncio.timeout(probe.timeout):
            if probe.command is not None:
                return await _execute(argv or probe.command, target)
            port = probe.port if isinstance(probe.port, int) else target.ports.get(probe.port)
            if port is None:
                return f"no port is called {probe.port}"
            host = probe.host or target.ip
            if probe.tcp:
                _, writer = await asyncio.open_connection(host, port)
                writer.close()
                return None
            url = f"{probe.scheme}://{host}:{port}{probe.http_path}"
            async with target.session.get(url, headers=probe.headers, allow_redirects=False, ssl=False) as answer:
                return None if 200 <= answer.status < 400 else f"{probe.http_path} answers {answer.status}"
    except TimeoutError:
        return f"no answer within {probe.timeout:g} s"
    except (OSError, aiohttp.ClientError) as error:
        return str(error) or type(error).__name__


async def _execute(argv: Sequence[str], target: Target) -> str | None:
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=dict(target.env),
        cwd=target.folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    return None if code == 0 else f"{argv[0]} ended with {code}"
