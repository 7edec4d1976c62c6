"""Limits of tenants, checked before a request's body is read."""
