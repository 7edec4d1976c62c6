"""What model families share: the interface, the registry and placeholder expansion."""
