"""Vocabularies in other formats than tokenizer.json."""
