"""What can be wrong with a prompt. Both are the client's: an answer of 400."""


class TemplateError(ValueError):
    """The messages cannot be put into the chat template, or the template itself refuses them."""


class PlaceholderError(ValueError):
    """The placeholders in the prompt do not fit the images of the request."""
