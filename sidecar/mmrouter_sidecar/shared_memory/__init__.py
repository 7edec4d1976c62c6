"""The node's shared memory folder and its janitor."""
