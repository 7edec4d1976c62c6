"""`mmrouter status` and what it shares with `up` and `doctor`."""
