"""The validated request of a search: strategy, number of new ids, and stop ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clearhead._core.validation import short_repr, validate
from clearhead.errors import ConfigError
from clearhead.generation.options import BeamSearch, Greedy, Sample, Strategy

DEFAULT_MAX_NEW_TOKENS = 128
MAX_NEW_TOKENS = 1 << 24  # ids and log-probabilities of a search are allocated at its start


@dataclass(frozen=True)
class SearchRequest:
    """A valid strategy and number of new ids, and sorted unique stop ids."""

    strategy: Strategy
    max_new_tokens: int
    stop_ids: tuple[int, ...]

    @classmethod
    def of(
        cls, strategy: Strategy | None, max_new_tokens: int | None, stop_ids: int | Sequence[int] | None
    ) -> SearchRequest:
        """Validate the arguments of `generate`; None stands for a default.

        Raises:
            ConfigError: If an argument is invalid.
        """
        strategy = validate(Greedy() if strategy is None else strategy, "strategy", Greedy | Sample | BeamSearch)
        n = DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_NEW_TOKENS:
            raise ConfigError(
                f"max_new_tokens is {short_repr(n)}; expected a whole number of at least 1 and at most "
                f"{MAX_NEW_TOKENS:,}"
            )
        ids = () if stop_ids is None else (stop_ids,) if isinstance(stop_ids, int) else tuple(stop_ids)
        if any(isinstance(id_, bool) or not isinstance(id_, int) or id_ < 0 for id_ in ids):
            raise ConfigError(f"stop_ids is {short_repr(stop_ids)}; expected an id, several ids, or None")
        return cls(strategy, n, tuple(sorted(set(ids))))

    @property
    def is_beam_search(self) -> bool:
        """Whether several hypotheses are kept; a beam of width 1 is greedy decoding, in transformers too."""
        return isinstance(self.strategy, BeamSearch) and self.strategy.width > 1
