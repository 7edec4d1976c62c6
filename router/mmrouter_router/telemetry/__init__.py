"""Metrics and traces of the router, and their export by OTLP."""
