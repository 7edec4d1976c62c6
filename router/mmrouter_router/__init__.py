"""The router: HTTP in, engine out (DESIGN.md 3)."""
