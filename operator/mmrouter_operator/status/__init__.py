"""Conditions, counts and ratios of a deployment, and their writer."""
