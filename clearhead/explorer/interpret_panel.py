"""The interpret panel: logit lens, reasons of one output token, activation patching, induction scores and neurons.

All computations are those of `clearhead.analysis`; this module selects positions and names for the page."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated

import torch
from torch import Tensor, nn

from clearhead import analysis
from clearhead._core.json_types import JSONObject
from clearhead._core.validation import NonNegativeInt, Range, require
from clearhead.analysis.measures import value_norms
from clearhead.analysis.reports import attention_layers
from clearhead.errors import ConfigError
from clearhead.explorer.causal_panel import MeasuredCall, measured_call
from clearhead.explorer.model_input import EncodedInput, ModelRequest, encode_input, with_answer
from clearhead.explorer.request import EmptyRequest, RequestContext, action, field_errors
from clearhead.models import Decoder

_MAX_POSITIONS = 24
_N_PARTS = 8
_N_SOURCES = 3
_N_NEURONS = 16
_CONFIRMED_SHARE = 0.3  # of a contribution, which its ablation must remove


@dataclass(frozen=True, kw_only=True)
class StepRequest(ModelRequest):
    """An input, and the generated token to explain; by default the last one."""

    step: NonNegativeInt | None = None


@dataclass(frozen=True, kw_only=True)
class PatchingRequest(StepRequest):
    """An input, and a second text of the same length."""

    other_text: str = ""


@dataclass(frozen=True, kw_only=True)
class NeuronRequest(ModelRequest):
    """An input, and a block by its index among the feed-forward networks."""

    block: Annotated[int, Range(ge=0, le=10_000)] = 0


@dataclass(frozen=True, kw_only=True)
class LensView:
    """The top prediction after every block, for the last positions of an input.

    Attributes:
        rows: "input", and the paths of the blocks.
        positions: Positions of the columns.
        tokens: Tokens at these positions.
        texts: The most probable next token of each cell.
        probabilities: Its probability.
        ranks: Rank of the model's final prediction; 0 is the first.
    """

    rows: list[str]
    positions: list[int]
    tokens: list[str]
    texts: list[list[str]]
    probabilities: list[list[float]]
    ranks: list[list[int]]


def lens_view(encoded: EncodedInput) -> LensView:
    """Return the top predictions for the last positions of an input."""
    names = encoded.pipeline.tokenizer.tokens
    n = len(encoded.input_ids)
    first = max(0, n - _MAX_POSITIONS, encoded.n_prompt - 1 if encoded.source_ids else 0)
    lens = analysis.logit_lens(encoded.pipeline.model, encoded.inputs, positions=list(range(first, n)))
    ids, probabilities = (x[:, 0, :, 0] for x in lens.top())
    return LensView(
        rows=["input", *lens.layers[1:]],
        positions=list(range(first, n)),
        tokens=names(encoded.input_ids[first:]),
        texts=[names(row) for row in ids.tolist()],
        probabilities=probabilities.tolist(),
        ranks=lens.ranks()[:, 0].tolist(),
    )


@action(ModelRequest)
@torch.no_grad()
def logit_lens(request: ModelRequest, context: RequestContext) -> JSONObject:
    """Return the top prediction after every block, for the last positions."""
    return asdict(lens_view(with_answer(encode_input(request, context))))


# ---------------------------------------------------------------------- why this token


@action(StepRequest)
def explain_token(request: StepRequest, context: RequestContext) -> JSONObject:
    """Return the largest direct contributions to a logit; the ablation of each; and the sources that a head reads."""
    call = measured_call(request, request.step, context)
    model = call.pipeline.model
    attribution = analysis.attribute(model, call.args, call.metric)
    context.checkpoint()
    parts = [part for part in attribution.largest if part.kind in ("head", "feed-forward", "attention")][:_N_PARTS]
    with (
        torch.no_grad(),
        analysis.trace(model, *{f"{part.path}.weights" for part in parts if part.head is not None}) as t,
    ):
        model(*call.args)
    rows = []
    for i, part in enumerate(parts):
        context.checkpoint(i, len(parts), part.name)
        change = _ablation(call, part)
        row: JSONObject = {
            "name": part.name,
            "path": part.path,
            "head": part.head,
            "value": part.value,
            "ablation": change,
        }
        row["verdict"] = _verdict(part.value, change)
        row["sources"] = [] if part.head is None else _sources(call, t, part.path, part.head)
        rows.append(row)
    listed = sum(part.value for part in parts)
    return {
        "target": call.target_name,
        "position": call.position,
        "logit": attribution.logit,
        "parts": rows,
        "others": attribution.logit - listed,
        "n_others": len(attribution.parts) - len(parts),
    }


def _ablation(call: MeasuredCall, part: analysis.LogitContribution) -> float:
    """Return the change of the logit when a part is set to zero."""
    granularity = "module" if part.head is None else "head"
    result = analysis.ablate(call.pipeline.model, call.args, call.metric, modules=part.path, granularity=granularity)  # type: ignore[arg-type]
    return float(result.change[0, part.head or 0])


def _verdict(value: float, change: float) -> str:
    """Return whether removing a part has the effect that its direct contribution predicts."""
    if change * value > 0:
        return "refuted"
    return "confirmed" if abs(change) >= _CONFIRMED_SHARE * abs(value) else "compensated"


@torch.no_grad()
def _sources(call: MeasuredCall, t: analysis.Trace, path: str, head: int) -> list[JSONObject]:
    """Return the keys whose values a head adds most at the measured position, with the ablation of each edge."""
    weights = t.weights(path, heads=head, rows=call.position)[0, 0, 0]  # (S,)
    values = t.values(path)[0]  # (K, S, E)
    n_heads = attention_layers(call.pipeline.model)[path].n_heads
    value = values[head * values.shape[0] // n_heads]
    projection: Tensor = attention_layers(call.pipeline.model)[path].o_proj.weight
    norms = value_norms(values.float(), projection.float())[head]
    shares = weights * norms
    shares = shares / shares.sum().clamp(min=1e-12)
    output = t.heads(path, heads=head)[0, 0, call.position]
    before = float(call.metric(call.pipeline.model(*call.args)))
    sources = []
    for key in shares.topk(min(_N_SOURCES, len(shares))).indices.tolist():
        without = output - weights[key] * value[key]
        with analysis.trace(call.pipeline.model, "output") as edited:
            edited.intervene(path, analysis.ReplaceActivation(without, heads=[head], positions=[call.position]))
            after = float(call.metric(call.pipeline.model(*call.args)))
        sources.append(
            {"key": key, "weight": float(weights[key]), "share": float(shares[key]), "ablation": after - before}
        )
    return sources


# ---------------------------------------------------------------------- patching, induction, neurons


@action(PatchingRequest)
@torch.no_grad()
def patching_grid(request: PatchingRequest, context: RequestContext) -> JSONObject:
    """Return how far each activation of this run, patched into the run of another text, restores the output token."""
    call = measured_call(request, request.step, context)
    encoded = with_answer(encode_input(request, context))
    with field_errors("other_text"):
        other = _other_input(request, encoded, context)
    names = call.pipeline.tokenizer.tokens
    stacks = {path.rpartition(".blocks.")[0] for path in attention_layers(call.pipeline.model)}
    grids: list[JSONObject] = []
    for stack in sorted(stacks, reverse=True):
        context.checkpoint(len(grids), len(stacks), stack or "blocks")
        pattern = f"{stack}.blocks.*" if stack else "blocks.*"
        result = analysis.patch(call.pipeline.model, call.args, other.inputs, call.metric, modules=pattern)
        is_source = stack == "encoder"
        ids = encoded.source_ids if is_source else encoded.input_ids
        other_ids = other.source_ids if is_source else other.input_ids
        restored = result.restored if result.clean != result.baseline else torch.zeros_like(result.values)
        grids.append(
            {
                "stack": stack,
                "rows": list(result.rows),
                "tokens": names(ids),
                "other_tokens": names(other_ids),
                "restored": restored.tolist(),
            }
        )
    return {"target": call.target_name, "clean": result.clean, "corrupted": result.baseline, "grids": grids}


def _other_input(request: PatchingRequest, encoded: EncodedInput, context: RequestContext) -> EncodedInput:
    """Return the other text with the generated tokens of this run; raise ConfigError if its length differs."""
    text_request = replace(request, text=request.other_text, ids=(), source_ids=(), n_prompt=0, generated_ids=())
    other = encode_input(text_request, context)
    ids = [*other.ids, *encoded.generated_ids]
    lengths = (len(other.source_ids), len(ids)), (len(encoded.source_ids), len(encoded.ids))
    n_other, n_this = lengths[0][not encoded.source_ids], lengths[1][not encoded.source_ids]
    require(
        lengths[0] == lengths[1], f"this text has {n_other} tokens and the other one {n_this}; expected the same number"
    )
    return replace(other, ids=ids)


@dataclass(frozen=True, kw_only=True)
class ModelNameRequest(EmptyRequest):
    """A model."""

    model: str


@action(ModelNameRequest)
@torch.no_grad()
def induction(request: ModelNameRequest, context: RequestContext) -> JSONObject:
    """Return the induction, duplicate-token and previous-token scores of every head on repeated random tokens."""
    model = context.registry.model(request.model).model
    if not isinstance(model, Decoder):
        raise ConfigError("induction scores need a decoder, which reads one text from left to right")
    return analysis.induction_scores(model).to_dict()


@action(NeuronRequest)
@torch.no_grad()
def neurons(request: NeuronRequest, context: RequestContext) -> JSONObject:
    """Return the neurons of a feed-forward network that are most active on this text, and their activations."""
    encoded = with_answer(encode_input(request, context))
    model = encoded.pipeline.model
    paths = _down_projections(model)
    require(bool(paths), "this model has no feed-forward network with a single output projection")
    require(request.block < len(paths), f"block is {request.block}; expected 0 to {len(paths) - 1}")
    path = paths[request.block]
    with analysis.trace(model, f"{path}.input") as t:
        model(*encoded.inputs)
    hidden: Tensor = t.input(path)[0].float()  # (T, F)
    strongest = hidden.abs().amax(0).topk(min(_N_NEURONS, hidden.shape[-1])).indices.tolist()
    is_source = path.startswith("encoder")
    ids = encoded.source_ids if is_source else encoded.input_ids
    return {
        "paths": paths,
        "path": path,
        "is_source": is_source,
        "tokens": encoded.pipeline.tokenizer.tokens(ids),
        "n_neurons": hidden.shape[-1],
        "share_positive": float((hidden > 0).float().mean()),
        "neurons": [{"index": i, "activations": [round(v, 4) for v in hidden[:, i].tolist()]} for i in strongest],
    }


def _down_projections(model: nn.Module) -> list[str]:
    """Return the paths of the last matrix of every feed-forward network; their inputs are the neurons."""
    result = []
    for path, module in model.named_modules():
        if path.rpartition(".")[2] == "feed_forward":
            linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
            result += [f"{path}.{linear[-1]}"] if 2 <= len(linear) <= 3 else []
    return result
