"""Proof of exactness: canaries, live sampling, learned sentinels."""
