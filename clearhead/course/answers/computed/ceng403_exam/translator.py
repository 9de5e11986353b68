"""Questions 1 and 5: a trained translator reads “Hello world”."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from clearhead.course.answers.content import AnswerTable

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.hub.pipelines import Pipeline

_SENTENCE = "Hello world"
_QUERY = 2  # the token " world"


def _translator() -> Pipeline:
    import clearhead as ch

    return ch.pipeline("en-es")


@lru_cache(maxsize=1)
def _hello_world() -> tuple[list[str], list[float], list[float]]:
    """Return tokens, scores and weights of one query in the first head of the translator's encoder."""
    import torch

    import clearhead as ch

    pipeline = _translator()
    path = "encoder.blocks.0.attention"
    with ch.trace(pipeline.model, f"{path}.weights") as trace, torch.no_grad():
        pipeline.translate([_SENTENCE])
    inputs = trace.attention_inputs(path)
    query, keys = inputs.q[0, 0, _QUERY], inputs.k[0, 0]
    scores = keys @ query / len(query) ** 0.5
    weights = trace.weights(path, heads=0)[0, 0, _QUERY]
    return _source_tokens(pipeline), scores.tolist(), weights.tolist()


def _source_tokens(pipeline: Pipeline) -> list[str]:
    tokenizer = pipeline.tokenizer
    return [*(token.strip() for token in tokenizer.tokens(tokenizer.encode(_SENTENCE))), "<stop>"]


def hello_world_query() -> str:
    """Return the token whose query the table shows."""
    return _hello_world()[0][_QUERY]


def hello_world_attention() -> AnswerTable:
    """Return scores and weights of one query of a trained translator."""
    rows = [
        [f"“{token}”", f"{score:.4f}", f"{weight:.4f}"] for token, score, weight in zip(*_hello_world(), strict=True)
    ]
    return AnswerTable(["key", "score q·k/√d_k", "weight"], rows)


def hello_world_weight_sum() -> str:
    """Return the sum of the weights."""
    return f"{sum(_hello_world()[2]):.4f}"


def translator_layers() -> int:
    """Return the number of layers in each stack of the bundled translator."""
    return len(_cross_attention_maps())


def translator_heads() -> int:
    """Return the number of heads of the bundled translator."""
    return _cross_attention_maps()[0].shape[0]


@lru_cache(maxsize=1)
def _cross_attention_maps() -> list[Tensor]:
    """Return the weights of cross-attention (H, T, S) of each decoder layer while the translation is read again."""
    import torch

    import clearhead as ch

    pipeline = _translator()
    tokenizer = pipeline.tokenizer
    source = [*tokenizer.encode(_SENTENCE), tokenizer.eos_id]
    target = [*pipeline.decoder_start_ids, *tokenizer.encode(translation())]
    pattern = "decoder.blocks.*.cross_attention.weights"
    with ch.trace(pipeline.model, pattern) as trace, torch.no_grad():
        pipeline.model(torch.tensor([source]), torch.tensor([target]))
    return [trace.weights(path)[0] for path in trace.paths]


def cross_attention() -> AnswerTable:
    """Return the mean weights of cross-attention when each token of the translation is predicted."""
    import torch

    tokenizer = _translator().tokenizer
    weights = torch.stack(_cross_attention_maps()).mean((0, 1))
    produced = [*(token.strip() for token in tokenizer.tokens(tokenizer.encode(translation()))), "<stop>"]
    header = ["produced", *(f"“{token}”" for token in _source_tokens(_translator()))]
    rows = [[f"“{token}”", *(f"{x:.2f}" for x in row)] for token, row in zip(produced, weights.tolist(), strict=True)]
    return AnswerTable(header, rows)


def translation() -> str:
    """Return the translation of the sentence."""
    return _translator().translate([_SENTENCE])[0]
