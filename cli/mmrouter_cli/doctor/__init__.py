"""`mmrouter doctor`: checks of a cluster and its deployments, each finding with advice."""
