"""Benchmarks: ``python -m bench [--json] [name ...]``, explained in docs/performance.md."""
