"""Typed values that the whole operator shares."""
