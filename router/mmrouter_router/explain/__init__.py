"""Why a request was routed as it was: decision traces and block evidence."""
