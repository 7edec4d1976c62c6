"""Prompt, keys and decision without sockets."""
