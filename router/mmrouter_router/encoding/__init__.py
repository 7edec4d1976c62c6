"""Encoding of images by the encoder pods: which encoder encodes which image, and when."""
