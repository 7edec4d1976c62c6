"""The routes of a router: OpenAI API, control API, operator report."""
