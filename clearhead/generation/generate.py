"""`generate` and `stream` for models, and `search` for any source of next-token logits.

These functions work on token ids; tokenizers convert from and to text.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import Protocol, cast, overload, runtime_checkable

from torch import nn

from clearhead._core.keywords import explain_keywords
from clearhead._core.validation import check_int, short_repr
from clearhead.errors import ConfigError, DtypeError
from clearhead.generation.beam import beam_search
from clearhead.generation.decoder import IncrementalDecoder, batch_bucket
from clearhead.generation.logits_processors import LogitsProcessors
from clearhead.generation.model_decoders import incremental_decoder
from clearhead.generation.options import BeamSearch, Greedy, Sample, Strategy
from clearhead.generation.prompts import Prompt
from clearhead.generation.request import Engine, SearchRequest, Slots
from clearhead.generation.results import Generated, GenerationStep
from clearhead.generation.token_loop import TokenLoop


@runtime_checkable
class TextGenerator(Protocol):
    """A model with its tokenizer, such as `clearhead.hub.Pipeline`: it generates text after a text."""

    def generate_texts(
        self, texts: Sequence[str], *, strategy: Strategy | None, max_new_tokens: int | None
    ) -> list[str]:
        """Return the new text after each text; None stands for the model's own settings."""
        ...


@overload
def generate(
    model: TextGenerator, prompt: str, *, strategy: Strategy | None = None, max_new_tokens: int | None = None
) -> str: ...


@overload
def generate(
    model: TextGenerator, prompt: list[str], *, strategy: Strategy | None = None, max_new_tokens: int | None = None
) -> list[str]: ...


@overload
def generate(
    model: nn.Module,
    prompt: Prompt,
    *,
    strategy: Strategy | None = None,
    max_new_tokens: int | None = None,
    stop_ids: int | Sequence[int] | None = None,
    decoder_start_ids: int | Sequence[int] | None = None,
    use_cache: bool = True,
    sliding_context: bool = False,
    logits_processors: LogitsProcessors | None = None,
    engine: Engine = "auto",
    slots: Slots = "auto",
) -> Generated: ...


@explain_keywords
def generate(
    model: nn.Module | TextGenerator,
    prompt: Prompt | str | list[str],
    *,
    strategy: Strategy | None = None,
    max_new_tokens: int | None = None,
    stop_ids: int | Sequence[int] | None = None,
    decoder_start_ids: int | Sequence[int] | None = None,
    use_cache: bool = True,
    sliding_context: bool = False,
    logits_processors: LogitsProcessors | None = None,
    engine: Engine = "auto",
    slots: Slots = "auto",
) -> Generated | str | list[str]:
    """Generate new ids for each prompt, or with a pipeline new text.

    A decoder continues its prompts; an encoder-decoder encodes them and generates after `decoder_start_ids`. Prompts of
    any lengths share a batch: when a sequence ends, the next prompt takes its slot, and each prompt gets the ids that
    it would get alone. The model is in evaluation mode while it runs and in its previous mode afterwards. The engine is
    used when it is equivalent; models with hooks or replaced modules run their own forward.

    Args:
        model: A decoder, an encoder-decoder, or a recurrent language model; or a pipeline, for text.
        prompt: A (B, T) tensor, a list of rows of any lengths, or one row; with a pipeline a text, or a list of texts.
        strategy: `Greedy()` (the default), `Sample(…)` or `BeamSearch(…)`; a pipeline's default is the model's own.
        max_new_tokens: Largest number of new ids per prompt; by default 128, or the pipeline's own.
        stop_ids: An id, or several, that end a sequence.
        decoder_start_ids: The id, or ids, that an encoder-decoder generates after.
        use_cache: If False, recompute all ids at every step: the same result, slower.
        sliding_context: Let a decoder with learned positions continue past the last of them, over the most recent ids
            that fit. Other positions need no such option.
        logits_processors: Ids that are forced, forbidden or penalized.
        engine: "auto" uses the engine if it is equivalent, "module" always the model's own forward, and "fused" raises
            if the engine cannot be used.
        slots: Number of sequences that are decoded at once; "auto" for as many as fit into memory, at most 128 (512 on
            a CPU).

    Returns:
        The new ids with their log-probabilities and scores; with a pipeline the new text, or a list of texts.

    Raises:
        ConfigError: If an option is invalid or does not apply to this model.
        ShapeError: If a prompt is empty, contains an invalid id, or exceeds the position table.
        LogitsError: If the model returns logits that no id can be chosen from.

    Example:
        generate(decoder, [[5, 3], [7, 2, 9]], strategy=Sample(temperature=0.8, seed=1), stop_ids=0).best
        generate(translator, sources, decoder_start_ids=1, stop_ids=2, strategy=BeamSearch(5)).best
    """
    request = SearchRequest.of(
        strategy,
        max_new_tokens,
        stop_ids,
        decoder_start_ids=decoder_start_ids,
        use_cache=use_cache,
        sliding_context=sliding_context,
        logits_processors=logits_processors,
        engine=engine,
        slots=slots,
    )
    if isinstance(model, TextGenerator):
        for name in request.options_of_ids():
            raise ConfigError(f"a pipeline does not take {name}; call generate(pipeline.model, ids, {name}=…)")
        return _generate_texts(model, prompt, strategy, max_new_tokens)
    # Texts are rejected when the decoder is made.
    return _search(incremental_decoder(model, cast(Prompt, prompt), request), request)


def _generate_texts(
    generator: TextGenerator, prompt: object, strategy: Strategy | None, max_new_tokens: int | None
) -> str | list[str]:
    """Return the text after a prompt, or after each of several."""
    if isinstance(prompt, str):
        return generator.generate_texts([prompt], strategy=strategy, max_new_tokens=max_new_tokens)[0]
    if not isinstance(prompt, list) or not all(isinstance(text, str) for text in prompt):
        raise DtypeError(f"the prompt is {short_repr(prompt)}; expected a text or a list of texts for a pipeline")
    return generator.generate_texts(prompt, strategy=strategy, max_new_tokens=max_new_tokens)


@explain_keywords
def stream(
    model: nn.Module,
    prompt: Prompt,
    *,
    strategy: Greedy | Sample | None = None,
    max_new_tokens: int | None = None,
    stop_ids: int | Sequence[int] | None = None,
    decoder_start_ids: int | Sequence[int] | None = None,
    use_cache: bool = True,
    sliding_context: bool = False,
    logits_processors: LogitsProcessors | None = None,
    engine: Engine = "auto",
) -> Iterator[GenerationStep]:
    """Generate like `generate`, and yield each step.

    Arguments are validated at once, and the model runs as steps are requested. Between steps, and after the loop ends
    or is left, the model is in its previous mode.

    Args:
        model: A decoder, an encoder-decoder, or a recurrent language model.
        prompt: A (B, T) tensor, a list of rows of any lengths, or one row.
        strategy: `Greedy()` (the default) or `Sample(…)`.
        max_new_tokens: Largest number of new ids per prompt; by default 128.
        stop_ids: An id, or several, that end a sequence.
        decoder_start_ids: The id, or ids, that an encoder-decoder generates after.
        use_cache: If False, recompute all ids at every step.
        sliding_context: Let a decoder with learned positions continue past the last of them.
        logits_processors: Ids that are forced, forbidden or penalized.
        engine: "auto", "module" or "fused", as in `generate`.

    Yields:
        The newest id of every row, its log-probability, and which rows are active.

    Raises:
        ConfigError: If the strategy is `BeamSearch`, whose ids may change until its end.

    Example:
        for step in stream(decoder, prompt, stop_ids=0):
            print(step.ids.tolist())
    """
    if isinstance(strategy, BeamSearch):
        raise ConfigError(
            f"{strategy} cannot be streamed because any id may change until its end; use generate, or Greedy() or "
            "Sample(…)"
        )
    request = SearchRequest.of(
        strategy,
        max_new_tokens,
        stop_ids,
        decoder_start_ids=decoder_start_ids,
        use_cache=use_cache,
        sliding_context=sliding_context,
        logits_processors=logits_processors,
        engine=engine,
        slots=sys.maxsize,  # all prompts at once
    )
    return TokenLoop(incremental_decoder(model, prompt, request), request).stream()


@explain_keywords
def search(
    decoder: IncrementalDecoder,
    *,
    strategy: Strategy | None = None,
    max_new_tokens: int | None = None,
    stop_ids: int | Sequence[int] | None = None,
) -> Generated:
    """Generate new ids from any `IncrementalDecoder`.

    Args:
        decoder: Produces next-token logits, for example an `UncachedDecoder` around a function of ids.
        strategy: `Greedy()` (the default), `Sample(…)` or `BeamSearch(…)`.
        max_new_tokens: Largest number of new ids per prompt; by default 128.
        stop_ids: An id, or several, that end a sequence.

    Returns:
        The new ids with their log-probabilities and scores.
    """
    request = SearchRequest.of(strategy, max_new_tokens, stop_ids)
    if not isinstance(decoder, IncrementalDecoder):
        raise DtypeError(
            f"got a {type(decoder).__name__}; expected an IncrementalDecoder with prefill(), decode_step(ids) and "
            "reorder_cache(rows) (wrap a function of ids in UncachedDecoder; pass a model to generate)"
        )
    return _search(decoder, request)


@explain_keywords
def warm_up(
    model: nn.Module,
    *,
    max_tokens: int,
    slots: int = 32,
    strategy: Greedy | Sample | None = None,
    decoder_start_ids: int | Sequence[int] | None = None,
) -> None:
    """Compile the kernels of a model and capture its CUDA graphs for all batch sizes, which otherwise happens lazily.

    Args:
        model: A decoder or an encoder-decoder.
        max_tokens: Largest number of tokens of a prompt and its new ids.
        slots: Largest number of sequences that will be decoded at once.
        strategy: The kind of strategy that will be used; its values may differ.
        decoder_start_ids: Start ids of an encoder-decoder.
    """
    check_int(max_tokens, "warm_up: max_tokens", minimum=4)
    check_int(slots, "warm_up: slots", minimum=1)
    for n in sorted({batch_bucket(n) for n in range(1, slots + 1)}, reverse=True):
        steps = stream(
            model, [[0]] * n, strategy=strategy, max_new_tokens=max_tokens - 1, decoder_start_ids=decoder_start_ids
        )
        for _ in itertools.islice(steps, 4):  # after the prefill, one step runs eagerly and the next is captured
            pass
        cast("Generator[GenerationStep, None, None]", steps).close()


def _search(decoder: IncrementalDecoder, request: SearchRequest) -> Generated:
    """Run the search of a request to its end."""
    if isinstance(request.strategy, BeamSearch):
        return beam_search(decoder, request)
    return TokenLoop(decoder, request).run()
