"""Tokenizers: the base classes, and those backed by the `tokenizers` library."""
