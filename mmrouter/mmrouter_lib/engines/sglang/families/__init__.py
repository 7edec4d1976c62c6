"""Families that SGLang counts, places or names by other rules than vLLM."""
