"""Texts that all formats of a booklet share."""

from __future__ import annotations

from fractions import Fraction

from clearhead.course.answers.booklet import Booklet, ResolvedAnswer


def answer_title(booklet: Booklet, answer: ResolvedAnswer) -> str:
    """Return the heading of an answer: the question's number, its topic and its points."""
    points = format_points(Fraction(answer.total))
    topic = f". {answer.title}" if answer.title else ""
    title = f"{answer.location}{topic} ({points} {'point' if answer.total == 1 else 'points'})"
    return title if booklet.is_whole else f"{booklet.title}. {title}"


def format_points(points: Fraction) -> str:
    """Return points as text, such as 2 or 1.5."""
    return str(points) if points.denominator == 1 else f"{float(points):g}"


def indentation(formula: str) -> int:
    """Return the number of spaces before a formula."""
    return len(formula) - len(formula.lstrip())
