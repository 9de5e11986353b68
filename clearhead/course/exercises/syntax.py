"""Trees of expressions: Python's parser reads the text, and nothing is executed."""

from __future__ import annotations

import ast

MAX_TEXT = 1000


def parse_tree(text: str, error: type[Exception]) -> ast.expr:
    """Parse an expression; which nodes are allowed is left to the caller.

    Args:
        text: The expression.
        error: Exception that is raised if the text is too long or is not an expression.

    Returns:
        Its tree.

    Example:
        >>> ast.dump(parse_tree("x", ValueError))
        "Name(id='x', ctx=Load())"
    """
    if len(text) > MAX_TEXT:
        raise error(f"the expression has {len(text)} characters; expected at most {MAX_TEXT}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise error(f"cannot read {text!r} as an expression") from None
