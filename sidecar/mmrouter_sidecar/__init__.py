"""The sidecar: reads one engine's KV events, owns the truth about its cache, tells every router (docs/feed.md)."""
