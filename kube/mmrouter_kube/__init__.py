"""Access to the Kubernetes API that operator and router share."""
