"""The course: exercises with exact solutions, verified proofs, claims that are executed, and five course documents."""

from typing import TYPE_CHECKING

from clearhead._core.lazy import lazy

if TYPE_CHECKING:
    from clearhead.course import claims as claims
    from clearhead.course import exercises as exercises
    from clearhead.course import proofs as proofs
    from clearhead.course import sources as sources

lazy(__name__)
