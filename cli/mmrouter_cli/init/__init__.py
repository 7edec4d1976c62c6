"""`mmrouter init`: answers to a commented mmrouter.yaml."""
