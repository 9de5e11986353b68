"""`generate` and `stream`: new ids from a model, and `search`, the same from anything that gives logits.

Nothing here knows text. A tokenizer makes ids before, and text of the ids after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Union

from torch import nn

from clearhead.errors import ConfigError, DtypeError
from clearhead.generation.adapters import stepper_for
from clearhead.generation.beam import beam_search
from clearhead.generation.choices import Beam, Generated, Greedy, How, Sample, Step
from clearhead.generation.limits import Limits
from clearhead.generation.prompts import Prompt
from clearhead.generation.stepper import Stepper
from clearhead.generation.walk import collect, walk
from clearhead.values import checked, shown

_GREEDY = Greedy()
MAX_NEW_TOKENS = 1 << 24  # ids and log-probabilities of a search are allocated at its start


def generate(
    model: nn.Module,
    prompt: Prompt,
    *,
    how: How = _GREEDY,
    max_new: int = 128,
    stop: int | Sequence[int] | None = None,
    start: int | Sequence[int] | None = None,
    use_cache: bool = True,
    slide: bool = False,
    limits: Limits | None = None,
) -> Generated:
    """Up to `max_new` new ids for each prompt, chosen as `how` says, ending early after a `stop` id.

        generate(decoder, [[5, 3], [7, 2, 9]], how=Sample(temperature=0.8, seed=1), max_new=50, stop=0).best
        generate(translator, sources, start=1, stop=2, how=Beam(5, length_penalty=0.6)).best

    A decoder goes on from its prompts. An encoder-decoder reads its prompts (the sources) and writes after
    `start`, an id or several. `prompt` is a (B, T) tensor, or a list of rows of any lengths; padding is added
    and hidden inside, and each row gets what it would get alone. `use_cache=False` computes everything anew
    at every step: the same ids, slower. `slide=True` lets a decoder with learned positions go on beyond the last of
    them, over the last ids that there are positions for; other positions go on by themselves. `limits` are ids that are
    forced or forbidden, whatever is likely.

    The fast way is taken where it is the same: a model that is watched or changed is called as it is.

    The model is in evaluation mode while it runs and in its former mode afterwards."""
    stops = _checked(how, max_new, stop)
    bounds: dict[str, Any] = {"start": start, "max_new": max_new, "stops": stops, "limits": limits}
    stepper = stepper_for(model, prompt, use_cache=use_cache, slide=slide, **bounds)
    return search(stepper, how=how, max_new=max_new, stop=stop)


def stream(
    model: nn.Module,
    prompt: Prompt,
    *,
    how: Greedy | Sample = _GREEDY,
    max_new: int = 128,
    stop: int | Sequence[int] | None = None,
    start: int | Sequence[int] | None = None,
    use_cache: bool = True,
    slide: bool = False,
    limits: Limits | None = None,
) -> Iterator[Step]:
    """The same as `generate`, one step at a time: each `Step` holds the newest id of every row.

        for step in stream(decoder, prompt, stop=0):
            print(step.ids.tolist())

    Arguments are checked at once, and the model runs as steps are asked for. Between steps, and when the loop
    is left by whatever way, the model is in its former mode. `Beam` cannot be streamed: until its end, any id
    may still change."""
    if isinstance(how, Beam):
        raise ConfigError(
            f"{how} cannot be streamed: until its end, any id may still change; use generate, or Greedy() or Sample(…)"
        )
    stops = _checked(how, max_new, stop, (Greedy, Sample))
    bounds: dict[str, Any] = {"start": start, "max_new": max_new, "stops": stops, "limits": limits}
    stepper = stepper_for(model, prompt, use_cache=use_cache, slide=slide, **bounds)
    return walk(stepper, how, max_new, stops)


def search(
    stepper: Stepper, *, how: How = _GREEDY, max_new: int = 128, stop: int | Sequence[int] | None = None
) -> Generated:
    """`generate` for any `Stepper`: a foreign model, or a plain function of ids wrapped in `Recompute`."""
    stops = _checked(how, max_new, stop)
    if not isinstance(stepper, Stepper):
        raise DtypeError(
            f"got a {type(stepper).__name__}; expected a Stepper, with begin(), step(ids) and reorder(rows) "
            "(a function of ids becomes one with Recompute; a model is for generate)"
        )
    if isinstance(how, Beam):
        return beam_search(stepper, how, max_new, stops)
    return collect(stepper, how, max_new, stops)


def _checked(how: Any, max_new: Any, stop: Any, choices: tuple[type, ...] = (Greedy, Sample, Beam)) -> tuple[int, ...]:
    """The stop ids, sorted, each once: one id, several, or none; refuses what is no way to choose, and no number."""
    checked(how, "how", Union[choices])  # noqa: UP007  (a union of what is given can be written only so)
    if isinstance(max_new, bool) or not isinstance(max_new, int) or not 1 <= max_new <= MAX_NEW_TOKENS:
        raise ConfigError(
            f"max_new is {shown(max_new)}; expected a whole number of at least 1 and at most {MAX_NEW_TOKENS:,}: "
            "how many ids to add at most"
        )
    ids = () if stop is None else (stop,) if isinstance(stop, int) else tuple(stop)
    if any(isinstance(id_, bool) or not isinstance(id_, int) or id_ < 0 for id_ in ids):
        raise ConfigError(f"stop is {stop!r}; expected an id, several ids, or None for no early end")
    return tuple(sorted(set(ids)))
