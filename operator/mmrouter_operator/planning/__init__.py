"""Pure planning: what to apply next for one deployment, and why."""
