"""Other routers, each in an environment of its own outside the checkout, driven as processes."""
