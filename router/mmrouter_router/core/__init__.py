"""Values that every part of the router shares: settings, errors, request ids, cost lines."""
