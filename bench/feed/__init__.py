"""The feed from engine events to the index."""
