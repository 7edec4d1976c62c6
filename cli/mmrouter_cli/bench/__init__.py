"""`mmrouter bench`: send a load to any OpenAI-compatible endpoint and report latency and cache hits (docs/bench.md)."""
