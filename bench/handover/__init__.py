"""Hand-over of payloads between processes."""
