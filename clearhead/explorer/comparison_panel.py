"""The comparison panel: two runs of two texts, two models or two checkpoints of one run, and the difference of a view.

Positions of the two runs are paired by their tokens; a difference is defined for pairs only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor

from clearhead import analysis
from clearhead._core.json_types import JSONObject
from clearhead._core.validation import NonNegativeInt, did_you_mean, require
from clearhead.analysis.reports import attention_layers
from clearhead.config import Validated
from clearhead.errors import ConfigError
from clearhead.explorer.causal_panel import AblationRow, CausalMapRequest, ablation_rows, measured_call
from clearhead.explorer.interpret_panel import LensView, lens_view
from clearhead.explorer.model_input import EncodedInput, ModelRequest, encode_input, with_answer
from clearhead.explorer.request import RequestContext, action
from clearhead.models import Decoder, EncoderDecoder

_MAX_POSITIONS = 40  # of a matrix; the last ones of a longer text


@dataclass(frozen=True, kw_only=True)
class ComparisonRequest(Validated):
    """Two inputs, each with its model."""

    first: ModelRequest
    second: ModelRequest


@dataclass(frozen=True, kw_only=True)
class AttentionComparisonRequest(ComparisonRequest):
    """Two inputs, and the head whose weights are compared; by default the head that differs most."""

    layer: str = ""
    head: NonNegativeInt | None = None


@dataclass(frozen=True, kw_only=True)
class AblationComparisonRequest(ComparisonRequest):
    """Two inputs, the output token of each that is measured, and the layers to ablate.

    Attributes:
        first_step: Index of a generated token of the first run; by default the last one.
        second_step: Likewise of the second run.
        layers: Paths of attention layers of both models; by default all.
    """

    first_step: NonNegativeInt | None = None
    second_step: NonNegativeInt | None = None
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenPositions:
    """The positions of one axis of a view: their indices in the run, their tokens, and the stack, "s" or "t"."""

    positions: list[int]
    tokens: list[str]
    stack: str

    def last(self, n: int) -> TokenPositions:
        """Return the last `n` positions."""
        return TokenPositions(self.positions[-n:], self.tokens[-n:], self.stack)


@dataclass(frozen=True)
class LabeledMatrix:
    """Values with the tokens of their rows and columns; None where a value is not defined."""

    rows: TokenPositions
    columns: TokenPositions
    values: list[list[float | None]]


def pair_tokens(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """Return pairs of positions: equal tokens, and tokens that replace each other one to one.

    Args:
        first: Tokens of the first run.
        second: Tokens of the second run.
    """
    pairs = []
    for kind, i, i_end, j, j_end in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if kind == "equal" or (kind == "replace" and i_end - i == j_end - j):
            pairs += list(zip(range(i, i_end), range(j, j_end), strict=True))
    return pairs


def _encode_pair(request: ComparisonRequest, context: RequestContext) -> tuple[EncodedInput, EncodedInput]:
    """Return both inputs; raise ConfigError unless both models generate text with attention."""
    pair = []
    for side in (request.first, request.second):
        model = context.registry.model(side.model).model
        if not isinstance(model, (Decoder, EncoderDecoder)) or not attention_layers(model):
            raise ConfigError(f"{side.model} does not generate text with attention; choose another model")
        pair.append(with_answer(encode_input(side, context)))
        context.checkpoint()
    return pair[0], pair[1]


def _has_same_vocabulary(first: EncodedInput, second: EncodedInput) -> bool:
    """Return whether the ids of both models have the same meaning, judged by their size and the ids of both runs."""
    ids = [*first.ids, *second.ids]
    configs: list[Any] = [first.pipeline.model.config, second.pipeline.model.config]
    if configs[0].vocab_size != configs[1].vocab_size:
        return False
    return first.pipeline.tokenizer.tokens(ids) == second.pipeline.tokenizer.tokens(ids)


# ---------------------------------------------------------------------- outputs


@action(ComparisonRequest)
@torch.no_grad()
def compare_outputs(request: ComparisonRequest, context: RequestContext) -> JSONObject:
    """Return the probability of every output token of the first run, in both runs, and the difference."""
    first, second = _encode_pair(request, context)
    names = first.pipeline.tokenizer.tokens(first.generated_ids)
    second_names = second.pipeline.tokenizer.tokens(second.generated_ids)
    pairs = dict(pair_tokens(names, second_names))
    probs = [_output_probabilities(side) for side in (first, second)]
    is_comparable = _has_same_vocabulary(first, second)
    columns = []
    for i, id_ in enumerate(first.generated_ids):
        j = pairs.get(i)
        other = None if j is None or not is_comparable else float(probs[1][j, id_])
        probability = float(probs[0][i, id_])
        columns.append(
            {
                "token": names[i],
                "position": first.n_prompt + i,
                "second_token": None if j is None else second_names[j],
                "first": probability,
                "second": other,
                "difference": None if other is None else other - probability,
            }
        )
    return {"columns": columns, "texts": [first.output_text, second.output_text], "is_comparable": is_comparable}


def _output_probabilities(encoded: EncodedInput) -> Tensor:
    """Return the probabilities (T, V) of every generated token."""
    return encoded.logits(encoded.n_prompt - 1).double().softmax(-1)[: len(encoded.generated_ids)]


# ---------------------------------------------------------------------- attention


@action(AttentionComparisonRequest)
@torch.no_grad()
def compare_attention(request: AttentionComparisonRequest, context: RequestContext) -> JSONObject:
    """Return how much every head differs, and the weights of one head in both runs with their difference."""
    pair = _encode_pair(request, context)
    layers = [attention_layers(side.pipeline.model) for side in pair]
    common = [path for path in layers[0] if path in layers[1]]
    require(bool(common), "the two models have no attention layer of the same name")
    require(not request.layer or request.layer in common, f"unknown layer; {did_you_mean(request.layer, common)}")
    weights = []
    for side in pair:
        with analysis.trace(side.pipeline.model, *(f"{path}.weights" for path in common)) as t:
            side.pipeline.model(*side.inputs)
        weights.append({path: t.weights(path)[0].double().cpu() for path in common})
        context.checkpoint()
    distances = {}
    for path in common:
        n_heads = min(weights[0][path].shape[0], weights[1][path].shape[0])
        axes = [attention_axes(side, path) for side in pair]
        distances[path] = [_mean_distance(weights[0][path][h], weights[1][path][h], *axes) for h in range(n_heads)]
    layer, head = _head_to_show(request, distances)
    first, second = (
        _last_positions(side_weights[layer][head], *attention_axes(side, layer))
        for side, side_weights in zip(pair, weights, strict=True)
    )
    maps = [asdict(matrix) for matrix in (first, second, _difference(first, second))]
    rows = [{"path": path, "heads": values} for path, values in distances.items()]
    return {"rows": rows, "layer": layer, "head": head, "maps": maps}


def attention_axes(encoded: EncodedInput, path: str) -> tuple[TokenPositions, TokenPositions]:
    """Return rows and columns of an attention layer; a row of cross-attention is the token that it predicts."""
    names = encoded.pipeline.tokenizer.tokens
    source = TokenPositions(list(range(len(encoded.source_ids))), names(encoded.source_ids), "s")
    target = TokenPositions(list(range(len(encoded.input_ids))), names(encoded.input_ids), "t")
    if path.startswith("encoder"):
        return source, source
    if path.endswith("cross_attention"):
        n = len(encoded.input_ids)
        written = [*names(encoded.ids[1 : n + 1]), "next"][:n]
        return TokenPositions(list(range(1, n + 1)), written, "t"), source
    return target, target


def _mean_distance(
    first: Tensor,
    second: Tensor,
    axes: tuple[TokenPositions, TokenPositions],
    other: tuple[TokenPositions, TokenPositions],
) -> float:
    """Return the mean total variation of paired rows (T, S); unpaired columns count as one."""
    rows = pair_tokens(axes[0].tokens, other[0].tokens)
    columns = pair_tokens(axes[1].tokens, other[1].tokens)
    if not rows or not columns:
        return 1.0
    a = first[[i for i, _ in rows]][:, [k for k, _ in columns]]
    b = second[[j for _, j in rows]][:, [k for _, k in columns]]
    distances = 0.5 * ((a - b).abs().sum(-1) + (a.sum(-1) - b.sum(-1)).abs())
    return round(float(distances.mean()), 4)


def _head_to_show(request: AttentionComparisonRequest, distances: Mapping[str, list[float]]) -> tuple[str, int]:
    """Return the requested head, or else the one that differs most."""
    candidates = [(value, path, h) for path, values in distances.items() for h, value in enumerate(values)]
    if request.layer:
        candidates = [item for item in candidates if item[1] == request.layer]
        if request.head is not None:
            n = len(candidates)
            require(request.head < n, f"head is {request.head}; expected 0 to {n - 1}")
            return request.layer, request.head
    _, layer, head = max(candidates)
    return layer, head


def _last_positions(weights: Tensor, rows: TokenPositions, columns: TokenPositions) -> LabeledMatrix:
    """Return a matrix (T, S), cut to the last positions, with its tokens."""
    part = weights[-_MAX_POSITIONS:, -_MAX_POSITIONS:]
    values: list[list[float | None]] = [[round(value, 4) for value in row] for row in part.tolist()]
    return LabeledMatrix(rows.last(_MAX_POSITIONS), columns.last(_MAX_POSITIONS), values)


def _difference(first: LabeledMatrix, second: LabeledMatrix) -> LabeledMatrix:
    """Return second − first for paired rows and columns, in the order of the first."""
    rows = dict(pair_tokens(first.rows.tokens, second.rows.tokens))
    columns = dict(pair_tokens(first.columns.tokens, second.columns.tokens))

    def change(i: int, k: int) -> float | None:
        if i not in rows or k not in columns:
            return None
        before, after = first.values[i][k], second.values[rows[i]][columns[k]]
        return None if before is None or after is None else round(after - before, 4)

    n_columns = len(first.columns.tokens)
    values = [[change(i, k) for k in range(n_columns)] for i in range(len(first.rows.tokens))]
    return LabeledMatrix(first.rows, first.columns, values)


# ---------------------------------------------------------------------- logit lens and residual stream


@action(ComparisonRequest)
@torch.no_grad()
def compare_lenses(request: ComparisonRequest, context: RequestContext) -> JSONObject:
    """Return the predictions after every block in both runs, and the change of the first run's final token."""
    first, second = (lens_view(side) for side in _encode_pair(request, context))
    columns = dict(pair_tokens(first.tokens, second.tokens))
    is_comparable = first.rows == second.rows
    difference = [
        [_change_of_prediction(first, second, i, j, columns.get(j)) for j in range(len(first.tokens))]
        for i in range(len(first.rows) if is_comparable else 0)
    ]
    return {"sides": [asdict(first), asdict(second)], "difference": difference, "is_comparable": is_comparable}


def _change_of_prediction(first: LensView, second: LensView, i: int, j: int, k: int | None) -> float | None:
    """Return the change of the top probability; −1 if the predictions differ, None if column `j` has no partner."""
    if k is None:
        return None
    if first.texts[i][j] != second.texts[i][k]:
        return -1.0
    return round(second.probabilities[i][k] - first.probabilities[i][j], 4)


@action(ComparisonRequest)
@torch.no_grad()
def compare_streams(request: ComparisonRequest, context: RequestContext) -> JSONObject:
    """Return the norms of the residual stream after every block in both runs, and 1 − cosine of paired vectors."""
    pair = _encode_pair(request, context)
    states = []
    for side in pair:
        with analysis.trace(side.pipeline.model, "**.blocks.*.output") as t:
            side.pipeline.model(*side.inputs)
        states.append({path: t.output(path)[0].double().cpu() for path in t.outputs})
        context.checkpoint()
    common = [path for path in states[0] if path in states[1]]
    require(bool(common), "the two models have no block of the same name")
    stacks = []
    for stack in dict.fromkeys(path.rpartition(".blocks.")[0] for path in common):
        paths = [path for path in common if path.rpartition(".blocks.")[0] == stack]
        stacks.append(_compare_stack(pair, states, paths, stack))
    return {"stacks": stacks}


def _compare_stack(
    pair: tuple[EncodedInput, EncodedInput], states: Sequence[dict[str, Tensor]], paths: Sequence[str], stack: str
) -> JSONObject:
    """Return norms and distances of the blocks of one stack."""
    axes = [attention_axes(side, f"{stack}.attention")[0] for side in pair]
    columns = dict(pair_tokens(axes[0].tokens, axes[1].tokens))
    norms = [[[round(v, 3) for v in side[path].norm(dim=-1).tolist()] for path in paths] for side in states]
    same_width = states[0][paths[0]].shape[-1] == states[1][paths[0]].shape[-1]
    distances: list[list[float | None]] = []
    for path in paths:
        first, second = states[0][path], states[1][path]
        row = []
        for j in range(len(first)):
            k = columns.get(j) if same_width else None
            row.append(None if k is None else round(1 - float(torch.cosine_similarity(first[j], second[k], dim=0)), 4))
        distances.append(row)
    start = max(0, len(axes[0].tokens) - _MAX_POSITIONS)
    second_start = max(0, len(axes[1].tokens) - _MAX_POSITIONS)
    return {
        "stack": stack,
        "rows": list(paths),
        "axes": [asdict(axis.last(_MAX_POSITIONS)) for axis in axes],
        "norms": [[row[start:] for row in norms[0]], [row[second_start:] for row in norms[1]]],
        "difference": [row[start:] for row in distances],
    }


# ---------------------------------------------------------------------- causal maps


@action(AblationComparisonRequest)
@torch.no_grad()
def compare_ablations(request: AblationComparisonRequest, context: RequestContext) -> JSONObject:
    """Return the change of the measured logit by each ablation in both runs, and the difference of the changes."""
    rows, targets = [], []
    for side, step in ((request.first, request.first_step), (request.second, request.second_step)):
        fields = {name: getattr(side, name) for name in ModelRequest.__dataclass_fields__}
        map_request = CausalMapRequest(**fields, step=step, layers=request.layers)
        call = measured_call(map_request, step, context)
        rows.append(ablation_rows(map_request, call, context)[0])
        targets.append(call.target_name)
    return {"rows": [_compare_rows(*pair) for pair in zip(*rows, strict=False)], "targets": targets}


def _compare_rows(first: AblationRow, second: AblationRow) -> JSONObject:
    """Return the cells of both rows: the heads, the layer, the feed-forward network, the skipped block."""
    cells = [[*row.heads, row.layer, row.feed_forward, row.skip] for row in (first, second)]
    difference = [None if a is None or b is None else b - a for a, b in zip(*cells, strict=False)]
    return {"path": first.path, "first": cells[0], "second": cells[1], "difference": difference}
