"""The blocks that one engine holds, and the journal that survives a restart."""
