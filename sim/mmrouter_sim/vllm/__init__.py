"""The simulated vLLM: command line, HTTP API, connectors, metrics, and the mmrouter plugin."""
