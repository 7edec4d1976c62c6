"""The engines of a deployment: discovery, feeds, block index and load."""
