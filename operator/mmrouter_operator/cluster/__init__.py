"""Reading and writing the Kubernetes API: client, watches, cache, lease, queue."""
