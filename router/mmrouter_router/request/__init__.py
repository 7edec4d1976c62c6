"""A parsed request: its prompt, and its body as an engine receives it."""
