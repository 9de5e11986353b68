"""The course: exercises with exact solutions, claims that are executed, and the five course documents."""

from typing import TYPE_CHECKING

from clearhead._core.lazy import lazy

if TYPE_CHECKING:
    from clearhead.course import claims as claims
    from clearhead.course import exercises as exercises
    from clearhead.course import sources as sources

lazy(__name__)
