"""The Python script of an intervention request, which does the same with `clearhead.analysis`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clearhead import analysis
from clearhead.explorer.model_input import EncodedInput

if TYPE_CHECKING:
    from clearhead.explorer.intervention_panel import InterventionRequest, InterventionSpec

PATCH_KINDS: dict[str, Any] = {"patch": analysis.PatchActivation, "mean": analysis.MeanAblation}
"""Interventions that read another trace."""


def traced_paths(layer: str) -> tuple[str, ...]:
    """Return what is traced in both forward passes: the weights of one layer, and the outputs of all blocks."""
    return f"{layer}.weights", "**.blocks.*.output", "output"


def source_paths(request: InterventionRequest, kind: str) -> list[str]:
    """Return the activations that interventions of a kind read from another forward pass."""
    return [
        f"{spec.path}.{'weights' if spec.heads else 'output'}" for spec in request.interventions if spec.kind == kind
    ]


_MASK_SCRIPT = """mask = masks.parse({0!r})
for path, layer in layers.items():
    if not path.endswith("cross_attention"):
        add_mask = lambda _, args, kwargs: (args, kwargs | {{"mask": mask}})
        layer.register_forward_pre_hook(add_mask, with_kwargs=True)"""
_TEMPERATURE_SCRIPT = """for layer in layers.values():
    layer.normalizer = dataclasses.replace(layer.normalizer, temperature={0!r})"""


_SKIP_SCRIPT = """inputs = {{}}
for path in {0!r}:
    store_input = lambda _, args, path=path: inputs.update({{path: args[0]}})
    model.get_submodule(path).register_forward_pre_hook(store_input)"""


def script(
    request: InterventionRequest,
    encoded: EncodedInput,
    edited: EncodedInput,
    patch_input: EncodedInput | None,
    layer: str,
    source: str,
) -> str:
    """Return the Python script that runs both forward passes and prints the differences."""
    trace = "with torch.no_grad(), analysis.trace(model, *{0}) as {1}:"
    call = "    model(source, ids)" if encoded.source_ids else "    model(ids)"
    lines = ["import dataclasses", "", "import torch", "", "from clearhead import analysis, hub, masks", ""]
    lines += [f"model = hub.pipeline({source!r}).model"]
    lines += [f"source = torch.tensor([{encoded.source_ids}])"] if encoded.source_ids else []
    lines += [f"ids = torch.tensor([{encoded.input_ids}])"]
    paths = (*traced_paths(layer), *source_paths(request, "mean"))
    lines += [f"paths = {paths!r}", trace.format("paths", "before"), call]
    if patch_input is not None:
        rows = ", ".join(f"torch.tensor({x.tolist()})" for x in patch_input.inputs)
        lines += [trace.format(source_paths(request, "patch"), "patch_source"), f"    model({rows})"]
    if request.target_position is not None:
        lines += [f"ids[0, {request.target_position}] = {edited.ids[request.target_position]}"]
    if request.mask.strip() or request.attention_temperature != 1.0:
        lines += ["layers = {p: m for p, m in model.named_modules() if type(m).__name__ == 'MultiHeadAttention'}"]
    lines += [_MASK_SCRIPT.format(request.mask)] if request.mask.strip() else []
    lines += [_TEMPERATURE_SCRIPT.format(request.attention_temperature)] if request.attention_temperature != 1.0 else []
    skipped = [spec.path for spec in request.interventions if spec.kind == "skip"]
    lines += [_SKIP_SCRIPT.format(skipped)] if skipped else []
    lines += [trace.format("paths", "after")]
    lines += [f"    after.intervene({spec.path!r}, {_to_python(spec)})" for spec in request.interventions]
    return "\n".join([*lines, call, "print(analysis.compare(before, after))", ""])


def _to_python(spec: InterventionSpec) -> str:
    """Return the Python expression of an intervention."""
    if spec.kind == "skip":
        return f"analysis.ReplaceActivation(lambda _: inputs[{spec.path!r}])"
    name, arguments = {
        "zero": ("ZeroAblation", []),
        "mean": ("MeanAblation", ["before"]),
        "scale": ("ReplaceActivation", [f"lambda x: {spec.factor!r} * x"]),
        "patch": ("PatchActivation", ["patch_source"]),
    }[spec.kind]
    for field in ("heads", "positions"):
        if value := getattr(spec, field):
            arguments.append(f"{field}={list(value)!r}")
    return f"analysis.{name}({', '.join(arguments)})"
