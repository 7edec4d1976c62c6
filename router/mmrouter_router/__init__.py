"""The router: HTTP in, engine out (docs/architecture.md)."""
