"""Pure core of streams that move to another engine: what was sent, whether and how the stream can be continued."""
