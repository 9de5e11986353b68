"""Text generation: greedy decoding, sampling and beam search over a KV cache.

A search works on token ids and logits. It calls a model through the three methods of `IncrementalDecoder`.

    from clearhead.generation import BeamSearch, Sample, generate, stream

    generate(decoder, [[5, 3], [7, 2, 9]], strategy=Sample(temperature=0.8, seed=1), max_new_tokens=50, stop_ids=0).best
    generate(translator, sources, decoder_start_ids=1, stop_ids=2, strategy=BeamSearch(5, length_penalty=0.6)).best
"""

from __future__ import annotations

from clearhead.generation.decoder import IncrementalDecoder, LogitsError, UncachedDecoder
from clearhead.generation.generate import TextGenerator, generate, search, stream, warm_up
from clearhead.generation.logits_processors import LogitsProcessors, WhisperTimestampRules
from clearhead.generation.options import BeamSearch, Greedy, Sample, Strategy
from clearhead.generation.request import DEFAULT_MAX_NEW_TOKENS
from clearhead.generation.results import Generated, GenerationStep

__all__ = [
    "DEFAULT_MAX_NEW_TOKENS", "BeamSearch", "Generated", "GenerationStep", "Greedy", "IncrementalDecoder",
    "LogitsError", "LogitsProcessors", "Sample", "Strategy", "TextGenerator", "UncachedDecoder",
    "WhisperTimestampRules", "generate", "search", "stream",
    "warm_up",
]  # fmt: skip
