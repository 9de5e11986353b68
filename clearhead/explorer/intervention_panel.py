"""The intervention panel: the same input twice, without and with interventions, and the difference.

The model itself is not changed. The result contains a Python script that does the same with `clearhead.analysis`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from clearhead import analysis, masks
from clearhead._core.json_types import JSONObject
from clearhead._core.validation import NonNegativeInt, Range, did_you_mean, require
from clearhead.analysis.reports import attention_layers
from clearhead.attention import Softmax
from clearhead.config import Validated
from clearhead.errors import ClearheadError, ConfigError
from clearhead.explorer.intervention_script import PATCH_KINDS, script, source_paths, traced_paths
from clearhead.explorer.model_input import EncodedInput, encode_input, has_answer, with_answer
from clearhead.explorer.request import RequestContext, action, field_errors
from clearhead.explorer.run_panel import RunRequest, generate_ids
from clearhead.models import Decoder, EncoderDecoder
from clearhead.nn import MultiHeadAttention

_N_CANDIDATES = 8
_MAX_CELLS = 64  # per side of a map


@dataclass(frozen=True, kw_only=True)
class InterventionSpec(Validated):
    """An intervention on the heads of an attention layer, or on the output of a module.

    Attributes:
        path: Path of the module.
        heads: Heads of an attention layer; none for the output of the module.
        positions: Positions; none for all.
        kind: "zero" and "mean" ablation, "scale" by `factor`, "patch" from another text, or "skip": the output is the
            input, which is possible for blocks only.
        factor: Factor of "scale".
    """

    path: str
    heads: tuple[NonNegativeInt, ...] = ()
    positions: tuple[NonNegativeInt, ...] = ()
    kind: Literal["zero", "mean", "scale", "patch", "skip"] = "zero"
    factor: Annotated[float, Range(ge=-100, le=100)] = 0.0


@dataclass(frozen=True, kw_only=True)
class InterventionRequest(RunRequest):
    """An input and what differs in the second forward pass. `layer` and `head` select the weights to show.

    `step` is the generated token whose candidates are shown; by default those of the token after the last one."""

    interventions: tuple[InterventionSpec, ...] = ()
    patch_text: str = ""  # the text whose activations patches come from
    mask: str = ""
    attention_temperature: Annotated[float, Range(gt=0, le=1000)] = 1.0
    target_position: NonNegativeInt | None = None  # where a token is replaced
    replacement: str = ""
    head: NonNegativeInt | None = None
    step: NonNegativeInt | None = None

    def validate(self) -> None:
        """Check the number of interventions."""
        n = len(self.interventions)
        require(n <= 256, f"interventions has {n} entries; expected at most 256")


@action(InterventionRequest)
@torch.no_grad()
def intervene(request: InterventionRequest, context: RequestContext) -> JSONObject:
    """Return predictions and weights of both forward passes, what the model writes, and all differences."""
    encoded = with_answer(encode_input(request, context))
    model = encoded.pipeline.model
    layers = attention_layers(model)
    for spec in request.interventions:
        _check_spec(spec, model, layers)
    layer = request.layer or list(layers)[-1]
    require(layer in layers, f"unknown attention layer {request.layer!r}; {did_you_mean(request.layer, layers)}")
    with analysis.trace(model, *traced_paths(layer), *source_paths(request, "mean")) as before:
        model(*encoded.inputs)
    context.checkpoint()
    with field_errors("replacement"):
        edited = _replace_token(request, encoded)
    patch_input, patch_source = _patch_source(request, encoded, context)
    after = analysis.trace(model, *traced_paths(layer))
    with _changed_model(request, model, layers, before, patch_source) as add_interventions:
        add_interventions(after)
        with after:
            model(*edited.inputs)
        context.checkpoint()
        now_writes = _regenerate(request, edited, context, add_interventions)
    changes = analysis.compare(before, after)
    kl = changes.logits.kl[0].tolist() if changes.logits else []
    return {
        "before": _summarize(encoded, before, layer, request),
        "after": _summarize(edited, after, layer, request),
        "writes": encoded.output_text,
        "now_writes": now_writes,
        "changes": changes.to_dict() | {"kl": [x if math.isfinite(x) else None for x in kl]},
        "python": script(request, encoded, edited, patch_input, layer, context.registry.sources[request.model]),
    }


def _check_spec(spec: InterventionSpec, model: nn.Module, layers: dict[str, MultiHeadAttention]) -> None:
    """Raise ConfigError unless the model has the module and the heads."""
    paths = dict(model.named_modules())
    require(spec.path in paths, f"unknown module {spec.path!r}; {did_you_mean(spec.path, paths)}")
    if spec.heads:
        require(spec.path in layers, f"{spec.path} has no heads; choose an attention layer")
        n_heads = layers[spec.path].n_heads
        require(max(spec.heads) < n_heads, f"{spec.path} has heads 0 to {n_heads - 1}, got {max(spec.heads)}")
    blocks = {path.rpartition(".")[0] for path in layers}
    is_block = spec.path in blocks and not spec.heads
    require(spec.kind != "skip" or is_block, f"only a block can be skipped, and {spec.path} is not a block")


def _patch_source(
    request: InterventionRequest, encoded: EncodedInput, context: RequestContext
) -> tuple[EncodedInput | None, analysis.Trace | None]:
    """Return the input whose activations are patched in, and its trace; None if nothing is patched."""
    paths = source_paths(request, "patch")
    if not paths:
        return None, None
    text_request = replace(request, text=request.patch_text, ids=(), source_ids=(), n_prompt=0, generated_ids=())
    with field_errors("patch_text"):
        patch_input = with_answer(encode_input(text_request, context))
        if not has_answer(encoded.pipeline):  # such a text ends where this run begins to write
            patch_input = replace(patch_input, ids=[*patch_input.ids, *encoded.generated_ids])
        _check_lengths(request, encoded, patch_input)
    with analysis.trace(encoded.pipeline.model, *paths) as patch_source:
        encoded.pipeline.model(*patch_input.inputs)
    return patch_input, patch_source


def _check_lengths(request: InterventionRequest, encoded: EncodedInput, patch_input: EncodedInput) -> None:
    """Raise ConfigError if a patch of all positions comes from a text of another length."""
    for spec in request.interventions:
        if spec.path.startswith("encoder"):
            patch_length, length = len(patch_input.source_ids), len(encoded.source_ids)
        else:
            patch_length, length = len(patch_input.input_ids), len(encoded.input_ids)
        require(
            spec.kind != "patch" or bool(spec.positions) or patch_length == length,
            f"the patch text has {patch_length} tokens and the text {length}; choose texts of equal length, "
            "or give positions",
        )


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
def _changed_model(
    request: InterventionRequest,
    model: nn.Module,
    layers: dict[str, MultiHeadAttention],
    before: analysis.Trace,
    patch_source: analysis.Trace | None,
) -> Iterator[Any]:
    """Change masks and temperature until the block ends; yield a function that adds the interventions to a trace."""
    inputs: dict[str, Tensor] = {}
    sources = {"patch": patch_source, "mean": before}

    def add_interventions(trace: analysis.Trace) -> None:
        for spec in request.interventions:
            trace.intervene(spec.path, _to_intervention(spec, sources.get(spec.kind), inputs))

    with _modified_attention(layers, request.mask, request.attention_temperature), contextlib.ExitStack() as stack:
        for spec in request.interventions:
            if spec.kind == "skip":
                hook = _input_hook(inputs, spec.path)
                stack.callback(model.get_submodule(spec.path).register_forward_pre_hook(hook).remove)
        yield add_interventions


def _input_hook(inputs: dict[str, Tensor], path: str) -> Any:
    """Return a hook that stores the input of a module."""

    def store(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[path] = args[0]

    return store


def _to_intervention(
    spec: InterventionSpec, source: analysis.Trace | None, inputs: dict[str, Tensor]
) -> analysis.Intervention:
    """Return the intervention of a request."""
    heads = list(spec.heads) or None
    positions = list(spec.positions) or None
    if spec.kind in PATCH_KINDS:
        assert source is not None
        return PATCH_KINDS[spec.kind](source, heads=heads, positions=positions)
    if spec.kind == "scale":
        return analysis.ReplaceActivation(lambda x: spec.factor * x, heads=heads, positions=positions)
    if spec.kind == "skip":
        return analysis.ReplaceActivation(lambda _: inputs[spec.path])
    return analysis.ZeroAblation(heads=heads, positions=positions)


def _regenerate(
    request: InterventionRequest, encoded: EncodedInput, context: RequestContext, add_interventions: Any
) -> str | None:
    """Return what the changed model writes; None if an intervention does not apply to new positions."""
    model = encoded.pipeline.model
    n_new = len(encoded.generated_ids)
    if not isinstance(model, (Decoder, EncoderDecoder)) or n_new == 0:
        return None
    prompt = replace(encoded, ids=encoded.ids[: encoded.n_prompt])
    trace = analysis.trace(model, "output", runs=1)
    add_interventions(trace)
    try:
        with trace:
            new_ids, _ = generate_ids(prompt, replace(request, max_new_tokens=min(n_new, 256)), context)
    except ClearheadError:  # such as a patch of positions that the new text does not have
        return None
    return replace(prompt, ids=[*prompt.ids, *new_ids]).output_text


@contextlib.contextmanager
def _modified_attention(layers: dict[str, MultiHeadAttention], mask: str, temperature: float) -> Iterator[None]:
    """Add a mask to all self-attention layers and set the temperature of all layers, until the block ends."""
    with field_errors("mask"):
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


def _summarize(encoded: EncodedInput, trace: analysis.Trace, layer: str, request: InterventionRequest) -> JSONObject:
    """Return what the page shows of one forward pass."""
    logits, head = trace.output("")[0], request.head
    position = len(logits) - 1 if request.step is None else encoded.n_prompt - 1 + request.step
    require(position < len(logits), f"step is {request.step}; expected at most {len(logits) - encoded.n_prompt}")
    probs = logits[position].double().softmax(-1)
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
        "weights": [[round(255 * math.sqrt(max(0.0, w))) for w in row] for row in weights.tolist()],
        "layer": layer,
        "head": head,
    }
