"""One address for many deployments: the model that a request names decides which deployment gets it."""
