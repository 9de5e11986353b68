"""The validated request of a search: how ids are chosen, when a sequence ends, and how the model is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from clearhead._core.validation import check_int, short_repr, validate
from clearhead.errors import ConfigError
from clearhead.generation.logits_processors import LogitsProcessors
from clearhead.generation.options import BeamSearch, Greedy, Sample, Strategy

Engine: TypeAlias = Literal["auto", "module", "fused"]
Slots: TypeAlias = int | Literal["auto"]
DEFAULT_MAX_NEW_TOKENS = 128
MAX_NEW_TOKENS = 1 << 24  # ids and log-probabilities of a search are allocated at its start


@dataclass(frozen=True)
class SearchRequest:
    """The arguments of `generate`, valid for every model; `stop_ids` are sorted and unique."""

    strategy: Strategy
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    decoder_start_ids: int | Sequence[int] | None = None
    use_cache: bool = True
    sliding_context: bool = False
    logits_processors: LogitsProcessors | None = None
    engine: Engine = "auto"
    slots: Slots = "auto"

    @classmethod
    def of(
        cls,
        strategy: Strategy | None,
        max_new_tokens: int | None,
        stop_ids: int | Sequence[int] | None,
        *,
        decoder_start_ids: int | Sequence[int] | None = None,
        use_cache: bool = True,
        sliding_context: bool = False,
        logits_processors: LogitsProcessors | None = None,
        engine: Engine = "auto",
        slots: Slots = "auto",
    ) -> SearchRequest:
        """Validate the arguments of `generate`; None stands for a default.

        Raises:
            ConfigError: If an argument is invalid.
        """
        n = DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_NEW_TOKENS:
            raise ConfigError(
                f"max_new_tokens is {short_repr(n)}; expected a whole number of at least 1 and at most "
                f"{MAX_NEW_TOKENS:,}"
            )
        ids = () if stop_ids is None else id_tuple(stop_ids)
        if ids is None:
            raise ConfigError(f"stop_ids is {short_repr(stop_ids)}; expected an id, several ids, or None")
        return cls(
            strategy=validate(Greedy() if strategy is None else strategy, "strategy", Greedy | Sample | BeamSearch),
            max_new_tokens=n,
            stop_ids=tuple(sorted(set(ids))),
            decoder_start_ids=decoder_start_ids,
            use_cache=use_cache,
            sliding_context=sliding_context,
            logits_processors=validate(logits_processors, "logits_processors", LogitsProcessors | None),
            engine=validate(engine, "engine", Engine),
            slots="auto" if slots == "auto" else check_int(slots, "slots", minimum=1),
        )

    @property
    def is_beam_search(self) -> bool:
        """Whether several hypotheses are kept; a beam of width 1 is greedy decoding, in transformers too."""
        return isinstance(self.strategy, BeamSearch) and self.strategy.width > 1

    def options_of_ids(self) -> Iterator[str]:
        """Yield the names of the options with which a search differs from the default, apart from its first two."""
        for field in dataclasses.fields(self)[2:]:
            if getattr(self, field.name) != field.default:
                yield field.name


def id_tuple(ids: int | Iterable[int]) -> tuple[int, ...] | None:
    """Return an id, or several, as a tuple; None if a value is not an id."""
    try:
        items = tuple(ids) if isinstance(ids, Iterable) else (ids,)
        return tuple(check_int(id_, "id") for id_ in items)
    except (ConfigError, TypeError):  # TypeError: a tensor without dimensions
        return None
