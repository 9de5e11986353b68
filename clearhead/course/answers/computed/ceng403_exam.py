"""Values, tables and figures of the answers to the CENG 403 exam."""

from __future__ import annotations

from functools import lru_cache

from clearhead.course.answers.content import AnswerTable

_SENTENCE = "Hello world"
_QUERY = 2  # the token " world"


@lru_cache(maxsize=1)
def _hello_world() -> tuple[list[str], list[float], list[float]]:
    """Return tokens, scores and weights of one query in the first head of the translator's encoder."""
    import torch

    import clearhead as ch

    pipeline = ch.pipeline("en-es")
    path = "encoder.blocks.0.attention"
    with ch.trace(pipeline.model, f"{path}.weights") as trace, torch.no_grad():
        pipeline.translate([_SENTENCE])
    inputs = trace.attention_inputs(path)
    query, keys = inputs.q[0, 0, _QUERY], inputs.k[0, 0]
    scores = keys @ query / len(query) ** 0.5
    weights = trace.weights(path, heads=0)[0, 0, _QUERY]
    tokenizer = pipeline.tokenizer
    tokens = [*tokenizer.tokens(tokenizer.encode(_SENTENCE)), "<stop>"]
    return tokens, scores.tolist(), weights.tolist()


def hello_world_query() -> str:
    """Return the token whose query the table shows."""
    return _hello_world()[0][_QUERY].strip()


def hello_world_attention() -> AnswerTable:
    """Return scores and weights of one query of a trained translator."""
    tokens, scores, weights = _hello_world()
    rows = [[f"“{token.strip()}”", score, weight] for token, score, weight in zip(tokens, scores, weights, strict=True)]
    return AnswerTable(["key", "score q·k/√d_k", "weight"], rows)


def hello_world_weight_sum() -> str:
    """Return the sum of the weights."""
    return f"{sum(_hello_world()[2]):.4f}"
