"""The intervention panel: the same input twice, without and with interventions, and the difference.

The model itself is not changed. The result contains a Python script that does the same with `clearhead.analysis`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import nn

from clearhead import analysis, masks
from clearhead._core.json_types import JSONObject
from clearhead._core.validation import NonNegativeInt, Range, did_you_mean, require
from clearhead.analysis.reports import attention_layers
from clearhead.attention import Softmax
from clearhead.config import Validated
from clearhead.errors import ConfigError
from clearhead.explorer.model_panel import EncodedInput, ModelRequest, encode_input, with_answer
from clearhead.explorer.request import RequestContext, action
from clearhead.nn import MultiHeadAttention

_N_CANDIDATES = 8
_MAX_CELLS = 64  # per side of a map
_KINDS: dict[str, type[analysis.Intervention]] = {
    "zero": analysis.ZeroAblation,
    "scale": analysis.ReplaceActivation,
    "patch": analysis.PatchActivation,
}


@dataclass(frozen=True, kw_only=True)
class InterventionSpec(Validated):
    """An intervention on the heads of an attention layer, or on the output of a module."""

    path: str
    heads: tuple[NonNegativeInt, ...] = ()
    positions: tuple[NonNegativeInt, ...] = ()
    kind: Literal["zero", "scale", "patch"] = "zero"
    factor: Annotated[float, Range(ge=-100, le=100)] = 0.0  # of kind "scale"


@dataclass(frozen=True, kw_only=True)
class InterventionRequest(ModelRequest):
    """An input and what differs in the second forward pass. `layer` and `head` select the weights to show."""

    interventions: tuple[InterventionSpec, ...] = ()
    patch_text: str = ""  # the text whose activations patches come from
    mask: str = ""
    temperature: Annotated[float, Range(gt=0, le=1000)] = 1.0
    target_position: NonNegativeInt | None = None  # where a token is replaced
    replacement: str = ""
    head: NonNegativeInt | None = None

    def validate(self) -> None:
        """Check the number of interventions."""
        n = len(self.interventions)
        require(n <= 64, f"interventions has {n} entries; expected at most 64")


@action(InterventionRequest)
@torch.no_grad()
def intervene(request: InterventionRequest, context: RequestContext) -> JSONObject:
    """Return next-token probabilities and weights of both forward passes, and all differences."""
    encoded = with_answer(encode_input(request, context))
    model = encoded.pipeline.model
    layers = attention_layers(model)
    for spec in request.interventions:
        _check_spec(spec, model, layers)
    layer = request.layer or list(layers)[-1]
    require(layer in layers, f"unknown attention layer {request.layer!r}; {did_you_mean(request.layer, layers)}")
    with analysis.trace(model, *_traced_paths(layer)) as before:
        model(*encoded.inputs)
    context.checkpoint()
    edited = _replace_token(request, encoded)
    patch_input = None
    patch_source = None
    if patch_paths := _patch_paths(request):
        patch_input = with_answer(encode_input(replace(request, text=request.patch_text), context))
        _check_lengths(request, encoded, patch_input)
        with analysis.trace(model, *patch_paths) as patch_source:
            model(*patch_input.inputs)
    after = analysis.trace(model, *_traced_paths(layer))
    for spec in request.interventions:
        after.intervene(spec.path, _to_intervention(spec, patch_source))
    with _modified_attention(layers, request.mask, request.temperature), after:
        model(*edited.inputs)
    context.checkpoint()
    changes = analysis.compare(before, after)
    kl = changes.logits.kl[0].tolist() if changes.logits else []
    return {
        "before": _summarize(encoded, before, layer, request.head),
        "after": _summarize(edited, after, layer, request.head),
        "changes": changes.to_dict() | {"kl": [x if math.isfinite(x) else None for x in kl]},
        "python": script(request, encoded, edited, patch_input, layer),
    }


def _traced_paths(layer: str) -> tuple[str, ...]:
    """Return what is traced in both forward passes: the weights of one layer, and the outputs of all blocks."""
    return f"{layer}.weights", "**.blocks.*.output", "output"


def _check_spec(spec: InterventionSpec, model: nn.Module, layers: dict[str, MultiHeadAttention]) -> None:
    """Raise ConfigError unless the model has the module and the heads."""
    paths = dict(model.named_modules())
    require(spec.path in paths, f"unknown module {spec.path!r}; {did_you_mean(spec.path, paths)}")
    if spec.heads:
        require(spec.path in layers, f"{spec.path} has no heads; choose an attention layer")
        n_heads = layers[spec.path].n_heads
        require(max(spec.heads) < n_heads, f"{spec.path} has heads 0 to {n_heads - 1}, got {max(spec.heads)}")


def _to_intervention(spec: InterventionSpec, patch_source: analysis.Trace | None) -> analysis.Intervention:
    """Return the intervention of a request."""
    heads = list(spec.heads) or None
    positions = list(spec.positions) or None
    if spec.kind == "patch":
        assert patch_source is not None
        return analysis.PatchActivation(patch_source, heads=heads, positions=positions)
    if spec.kind == "scale":
        return analysis.ReplaceActivation(lambda x: spec.factor * x, heads=heads, positions=positions)
    return analysis.ZeroAblation(heads=heads, positions=positions)


def _check_lengths(request: InterventionRequest, encoded: EncodedInput, patch_input: EncodedInput) -> None:
    """Raise ConfigError if a patch of all positions comes from a text of another length."""
    for spec in request.interventions:
        if spec.path.startswith("encoder"):
            patch_length, length = len(patch_input.source_ids), len(encoded.source_ids)
        else:
            patch_length, length = len(patch_input.ids), len(encoded.ids)
        require(
            spec.kind != "patch" or bool(spec.positions) or patch_length == length,
            f"the patch text has {patch_length} tokens and the text {length}; choose texts of equal length, "
            "or give positions",
        )


def _patch_paths(request: InterventionRequest) -> list[str]:
    """Return what is traced of the patch text."""
    return [
        f"{spec.path}.{'weights' if spec.heads else 'output'}" for spec in request.interventions if spec.kind == "patch"
    ]


def _replace_token(request: InterventionRequest, encoded: EncodedInput) -> EncodedInput:
    """Return the input with another token at the target position."""
    position = request.target_position
    if position is None:
        return encoded
    require(position < len(encoded.ids), f"target position is {position}; expected 0 to {len(encoded.ids) - 1}")
    new_ids = encoded.pipeline.tokenizer.encode(request.replacement)
    require(
        len(new_ids) == 1,
        f"{request.replacement!r} is {len(new_ids)} tokens for {encoded.pipeline.name}; expected exactly one",
    )
    return replace(encoded, ids=[*encoded.ids[:position], new_ids[0], *encoded.ids[position + 1 :]])


@contextlib.contextmanager
def _modified_attention(layers: dict[str, MultiHeadAttention], mask: str, temperature: float) -> Iterator[None]:
    """Add a mask to all self-attention layers and set the temperature of all layers, until the block ends."""
    mask_kwargs = {"mask": masks.parse(mask)} if mask.strip() else {}
    with contextlib.ExitStack() as stack:
        for path, layer in layers.items():
            if mask_kwargs and not path.endswith("cross_attention"):
                handle = layer.register_forward_pre_hook(
                    lambda _, args, kwargs: (args, kwargs | mask_kwargs), with_kwargs=True
                )
                stack.callback(handle.remove)
            if temperature != 1.0:
                if not isinstance(layer.normalizer, Softmax):
                    raise ConfigError("a temperature needs softmax attention, but this model uses another normalizer")
                stack.callback(setattr, layer, "normalizer", layer.normalizer)
                layer.normalizer = replace(layer.normalizer, temperature=temperature)
        yield


def _summarize(encoded: EncodedInput, trace: analysis.Trace, layer: str, head: int | None) -> JSONObject:
    """Return what the page shows of one forward pass."""
    probs = trace.output("")[0, -1].double().softmax(-1)
    best = probs.topk(min(_N_CANDIDATES, len(probs)))
    names = encoded.pipeline.tokenizer.tokens(best.indices)
    weights = trace.weights(layer, heads=head)[0].mean(0)  # (T, S)
    if max(weights.shape) > _MAX_CELLS:
        size = tuple(min(n, _MAX_CELLS) for n in weights.shape)
        weights = nn.functional.adaptive_max_pool2d(weights[None].float(), size)[0]
    return encoded.to_dict() | {
        "candidates": [
            {"id": i, "token": name, "probability": p}
            for i, name, p in zip(best.indices.tolist(), names, best.values.tolist(), strict=True)
        ],
        # The square root resolves small weights better.
        "weights": [[round(255 * math.sqrt(w)) for w in row] for row in weights.tolist()],
        "layer": layer,
        "head": head,
    }


_MASK_SCRIPT = """mask = masks.parse({0!r})
for path, layer in layers.items():
    if not path.endswith("cross_attention"):
        add_mask = lambda _, args, kwargs: (args, kwargs | {{"mask": mask}})
        layer.register_forward_pre_hook(add_mask, with_kwargs=True)"""
_TEMPERATURE_SCRIPT = """for layer in layers.values():
    layer.normalizer = dataclasses.replace(layer.normalizer, temperature={0!r})"""


def script(
    request: InterventionRequest,
    encoded: EncodedInput,
    edited: EncodedInput,
    patch_input: EncodedInput | None,
    layer: str,
) -> str:
    """Return the Python script that runs both forward passes and prints the differences."""
    trace = "with torch.no_grad(), analysis.trace(model, *{0}) as {1}:"
    call = "    model(source, ids)" if encoded.source_ids else "    model(ids)"
    lines = ["import dataclasses", "", "import torch", "", "from clearhead import analysis, hub, masks", ""]
    lines += [f"model = hub.pipeline({request.model!r}).model"]
    lines += [f"source = torch.tensor([{encoded.source_ids}])"] if encoded.source_ids else []
    lines += [f"ids = torch.tensor([{encoded.ids}])"]
    lines += [f"paths = {_traced_paths(layer)!r}", trace.format("paths", "before"), call]
    if patch_input is not None:
        rows = ", ".join(f"torch.tensor({x.tolist()})" for x in patch_input.inputs)
        lines += [trace.format(_patch_paths(request), "patch_source"), f"    model({rows})"]
    if request.target_position is not None:
        lines += [f"ids[0, {request.target_position}] = {edited.ids[request.target_position]}"]
    if request.mask.strip() or request.temperature != 1.0:
        lines += ["layers = {p: m for p, m in model.named_modules() if type(m).__name__ == 'MultiHeadAttention'}"]
    lines += [_MASK_SCRIPT.format(request.mask)] if request.mask.strip() else []
    lines += [_TEMPERATURE_SCRIPT.format(request.temperature)] if request.temperature != 1.0 else []
    lines += [trace.format("paths", "after")]
    lines += [f"    after.intervene({spec.path!r}, {_to_python(spec)})" for spec in request.interventions]
    return "\n".join([*lines, call, "print(analysis.compare(before, after))", ""])


def _to_python(spec: InterventionSpec) -> str:
    """Return the Python expression of an intervention."""
    arguments = {"zero": [], "scale": [f"lambda x: {spec.factor!r} * x"], "patch": ["patch_source"]}[spec.kind]
    for name in ("heads", "positions"):
        if value := getattr(spec, name):
            arguments.append(f"{name}={list(value)!r}")
    return f"analysis.{_KINDS[spec.kind].__name__}({', '.join(arguments)})"
