"""Pure core of streams that move to another engine: what was sent, whether it can go on, how it goes on."""
