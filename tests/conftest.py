"""What tests of every level share: root certificates that are read once."""

import os
import ssl
from functools import lru_cache

import certifi
import pytest

ROOTS = frozenset({certifi.where(), os.environ.get("SSL_CERT_FILE")})
"""The files that an HTTP client reads the root certificates from, of whom nobody says otherwise."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Have every HTTP client of this process share one set of root certificates.

    A client reads them when it is made, 140 of them in 20 ms, also for a server of this machine without TLS. Tests make
    thousands of clients, for a call or two each: they were a quarter of all that some levels computed. A context that
    somebody changes, for a CA or a certificate of their own, is made from another file, and is not shared.
    """
    made = ssl.create_default_context
    shared = lru_cache(made)

    def create(*args: object, **options: object) -> ssl.SSLContext:
        if not args and set(options) == {"cafile"} and options["cafile"] in ROOTS:
            return shared(cafile=options["cafile"])  # type: ignore[arg-type]
        return made(*args, **options)  # type: ignore[arg-type]

    ssl.create_default_context = create
