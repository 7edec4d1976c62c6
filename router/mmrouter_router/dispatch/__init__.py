"""Sending a placed request to its engines: stages, retries, SGLang pairs."""
