"""`mmrouter doctor`: checks of a cluster and its deployments, each finding with advice.

``collect`` reads; the checks judge what was read; ``findings`` prints.
"""
