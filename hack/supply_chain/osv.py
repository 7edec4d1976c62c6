"""Ask OSV's database which crates and Debian packages of bills of materials have known vulnerabilities.

The API is ``/v1/querybatch``, which answers queries with the ids of vulnerabilities, and ``/v1/vulns/ID``, which gives
one of them. Debian's are listed by source package and release.
"""

import json
import urllib.request
from collections.abc import Iterable, Iterator
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from hack.build_once import CannotMakeError, FailedError, note

CRATES = "crates.io"
TIMEOUT_SECONDS = 60


class Query(NamedTuple):
    ecosystem: str
    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.ecosystem})"


def queries(components: Iterable[dict[str, Any]]) -> list[Query]:
    """Return one query for each crate and for each source package of Debian among components of bills."""
    wanted = set()
    for component in components:
        purl = urlsplit(component["purl"])
        if purl.path.startswith("cargo/"):
            wanted.add(Query(CRATES, component["name"], component["version"]))
        elif purl.path.startswith("deb/"):
            qualifiers = dict(parse_qsl(purl.query))
            source, _, version = qualifiers["upstream"].partition("@")
            # The database refuses an ecosystem that it does not have, such as a release that an image does not name.
            wanted.add(Query(qualifiers.get("distro", "").replace("debian-", "Debian:"), source, version))
    return sorted(wanted)


def compare(url: str, asked: list[Query]) -> None:
    """Print the known vulnerabilities. Raises :class:`FailedError` where a crate has one or Debian has fixed one, and
    :class:`CannotMakeError` where the database cannot be read. What Debian has not fixed is printed only, because no
    other version of the package could be taken.
    """
    failing = 0
    for query, identifier in vulnerabilities(url, asked):
        fails = query.ecosystem == CRATES or has_fix(ask(f"{url}/v1/vulns/{identifier}"), query)
        failing += fails
        note(f"{query}: {identifier}{'' if fails else ', not fixed in this release'}")
    if failing:
        raise FailedError(f"crates and Debian packages: {failing} known vulnerabilities")
    note(f"{len(asked)} crates and Debian packages: no known vulnerability that another version fixes")


def vulnerabilities(url: str, asked: list[Query]) -> Iterator[tuple[Query, str]]:
    """Yield each vulnerable query with the id of a vulnerability. Raises :class:`CannotMakeError`."""
    pending = [(query, dict[str, str]()) for query in asked]
    while pending:
        body = [
            {"package": {"ecosystem": query.ecosystem, "name": query.name}, "version": query.version, **page}
            for query, page in pending
        ]
        results = ask(f"{url}/v1/querybatch", {"queries": body})["results"]
        answered = [(query, result) for (query, _), result in zip(pending, results, strict=True)]
        yield from ((query, each["id"]) for query, result in answered for each in result.get("vulns", ()))
        pages = ((query, result.get("next_page_token")) for query, result in answered)
        pending = [(query, {"page_token": token}) for query, token in pages if token]


def has_fix(vulnerability: dict[str, Any], query: Query) -> bool:
    """Whether a version of the query's package in its ecosystem is without the vulnerability."""
    return any(
        "fixed" in event
        for affected in vulnerability["affected"]
        if affected["package"]["ecosystem"] == query.ecosystem and affected["package"]["name"] == query.name
        for span in affected.get("ranges", ())
        for event in span["events"]
    )


def ask(url: str, body: Any = None) -> Any:
    """Return the JSON that a URL answers, to a POST where there is a body. Raises :class:`CannotMakeError`."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return json.load(answer)
    except (OSError, HTTPException, ValueError) as error:
        raise CannotMakeError(f"the database of vulnerabilities cannot be read ({error})") from error
