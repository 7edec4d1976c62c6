"""Hand-over of processed images through shared memory, and the vLLM plugin that needs it."""
