"""The router side of the sidecar: the feed and its history."""
