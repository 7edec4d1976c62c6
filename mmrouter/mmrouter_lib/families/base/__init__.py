"""What model families share: the interface, the registry, placeholder expansion and the CLIP tower."""
