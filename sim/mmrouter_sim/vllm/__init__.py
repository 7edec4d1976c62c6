"""The HTTP side of the simulated engines."""
