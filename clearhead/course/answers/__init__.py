"""Model answers of the course documents, with mark schemes; every number in them is computed when they are shown.

An answer is a Markdown file, `<document>/<question>.md`, with placeholders for what code computes.
"""
