"""One file per engine: launch flags, event decoding, request rewriting, metric names."""
