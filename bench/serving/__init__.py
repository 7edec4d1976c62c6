"""A router process under load."""
