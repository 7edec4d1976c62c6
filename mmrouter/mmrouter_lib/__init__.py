"""The library that operator, sidecar and router agree on: pure functions and values, no sockets, no cluster client."""

__version__ = "0.1.0"
