"""How a request's images reach engines: in the body, as files of the node, or processed by a renderer."""
