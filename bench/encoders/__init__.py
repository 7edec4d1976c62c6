"""Encoders in virtual time."""
