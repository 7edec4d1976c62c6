"""Answers in a form that a request asks for: JSON schemas, regular expressions, grammars, choices, structural tags."""
