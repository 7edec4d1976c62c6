"""From the resource to Kubernetes objects."""
