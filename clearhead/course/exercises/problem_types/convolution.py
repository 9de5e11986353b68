"""Shapes, weights and receptive fields of a stack of convolutions, poolings and linear layers.

out = ⌊(in + 2·padding − kernel) / stride⌋ + 1        weights = filters · (kernel · kernel · channels + 1)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import nn

from clearhead.course.exercises.algebra import Matrix
from clearhead.course.exercises.random_values import RandomValues
from clearhead.course.exercises.sheet import ExactGrid, WorksheetBuilder
from clearhead.course.exercises.source import ProblemSource

_FILTERS = (2, 4, 6, 8, 10, 12, 16, 20)
_MAX_DRAWS = 200
_LAYERS = ("convolution", "average-pool", "max-pool", "flatten", "linear")
Pair = tuple[int, ...]


@dataclass(frozen=True)
class LayerOutput:
    """Output of one layer: channels × height × width, weights, and the receptive field of each output with padding."""

    name: str
    channels: int
    size: Pair
    weights: int = 0
    field: Pair = (1, 1)
    jump: Pair = (1, 1)
    derivation: str = ""
    flat: bool = False


def solve(source: ProblemSource, sheet: WorksheetBuilder) -> None:
    shape = source.values.get("input")
    if not isinstance(shape, list) or len(shape) != 3 or not all(type(n) is int and 1 <= n <= 10**6 for n in shape):
        source.fail("input", "input must be [channels, height, width], three whole numbers")
    stage = LayerOutput("input", shape[0], (shape[1], shape[2]))
    stages = [stage]
    modules = []
    layers = source.tables("layer")
    if not layers:
        source.fail(None, "there is no [[layer]]; expected at least one")
    for i, layer in enumerate(layers):
        stage, module = _apply(layer, stage, i)
        stages.append(stage)
        modules.append(module)
    names = [s.name for s in stages]
    shapes = _to_integers([s.channels, *s.size] for s in stages)
    counted = _to_integers([s.weights] for s in stages[1:])
    derivation = "; ".join(f"{s.name}: {s.derivation}" for s in stages if s.derivation)
    size = ExactGrid.of(_to_integers([shape]), ["input"], ["channels", "height", "width"])
    sheet.add("input", "Size of the input", size, is_given=True)
    sheet.add("layers", "Layers", _layer_table(layers, names[1:]), is_given=True)
    plain = "out = ⌊(in + 2·padding − kernel) / stride⌋ + 1"
    latex = r"n_{\mathrm{out}} = \left\lfloor \frac{n_{\mathrm{in}} + 2p - k}{s} \right\rfloor + 1"
    sheet.add(
        "shapes", "Shapes", ExactGrid.of(shapes, names, ["channels", "height", "width"]), "", plain, latex, derivation
    )
    grid = ExactGrid.of(counted, names[1:], ["weights"])
    formula = "filters · (kernel height · kernel width · channels + 1)"
    weights = sheet.add("weights", "Trainable weights, with biases", grid, "", formula, r"F (k_h k_w C + 1)")
    sheet.add("total", "All of them", ExactGrid.scalar(sympy.Add(*[x for [x] in weights])), "", "their sum", r"\sum w")
    grid = ExactGrid.of(_to_integers(s.field for s in stages), names, ["height", "width"])
    plain = "r = r_before + (kernel − 1)·(product of the strides before)"
    latex = r"r_l = r_{l-1} + (k_l - 1) \prod_{m < l} s_m"
    sheet.add("field", "Receptive field: size of the input that one output depends on", grid, "", plain, latex)
    if any(layer.values.get("padding", 0) not in (0, [0, 0]) for layer in layers):
        high, wide = shape[1:]
        sheet.remarks.append(
            f"Receptive fields include zeros of the padding. No output depends on more than the {high}×{wide} entries "
            "of the input, and outputs near its edges depend on fewer entries than their field has."
        )
    # Torch's own layers on the meta device: shapes and parameter counts without any arithmetic.
    x = torch.empty(1, *shape, device="meta")
    shapes_by_torch = []
    for module in modules:
        x = module(x)
        shapes_by_torch.append([*x.shape[1:], 1, 1][:3])
    sizes = [[sum(p.numel() for p in module.parameters())] for module in modules]
    sheet.check("the shapes of torch's layers", (shapes[1:], shapes_by_torch))
    sheet.check("the parameters of torch's layers", (counted, sizes))


def _to_integers(rows: Iterable[Iterable[int]]) -> Matrix:
    return [[sympy.Integer(n) for n in row] for row in rows]


def vary(source: ProblemSource, rng: RandomValues) -> dict[str, object]:
    """Return the same layers with other sizes; if no size of the original is rounded down, none of the variant is."""
    is_exact = not _rounds_down(source.values)
    for _ in range(_MAX_DRAWS):
        drawn = _draw(source, rng)
        if not (is_exact and _rounds_down(drawn)):
            break
    return drawn


def _rounds_down(values: dict[str, Any]) -> bool:
    """Return whether a stride does not divide the positions of its kernel, so that a size is rounded down."""
    sides = list(values["input"][1:])
    for layer in values["layer"]:
        if "kernel" not in layer:
            break
        default = layer["kernel"] if "pool" in layer["type"] else 1
        sizes = (layer["kernel"], layer.get("stride", default), layer.get("padding", 0))
        pairs = [size if isinstance(size, list) else [size, size] for size in sizes]
        for i, (kernel, stride, padding) in enumerate(zip(*pairs, strict=True)):
            if (sides[i] + 2 * padding - kernel) % stride:
                return True
            sides[i] = (sides[i] + 2 * padding - kernel) // stride + 1
    return False


def _draw(source: ProblemSource, rng: RandomValues) -> dict[str, Any]:
    """Return the same layers with other sizes; squares stay squares."""

    def near(value: Any, low: int) -> Any:
        if isinstance(value, list):
            return [near(value[0], low)] * 2 if value[0] == value[1] else [near(side, low) for side in value]
        return value if value == low else rng.randint(max(low + 1, value - 2), value + 3)

    channels, high, wide = source.values["input"]
    size = rng.randint(high - high // 4, high + high // 2)
    layers = []
    for layer in source.values["layer"]:
        kernel = near(layer["kernel"], 2) if "kernel" in layer else 0
        changes = {"kernel": kernel, "filters": rng.choice(_FILTERS), "outputs": rng.randint(4, 20)}
        changes["padding"] = rng.randint(0, 2)
        changes["stride"] = kernel if "pool" in layer["type"] else near(layer.get("stride", 1), 1)
        layers.append({key: changes.get(key, value) for key, value in layer.items()})
    width = size if high == wide else rng.randint(wide - wide // 4, wide + wide // 2)
    return {"input": [channels, size, width], "layer": layers}


def _layer_table(layers: list[ProblemSource], names: list[str]) -> ExactGrid:
    """Return a table of the layers in the file."""
    keys = ("type", "filters", "kernel", "stride", "padding", "outputs")
    used = [key for key in keys if any(key in layer.values for layer in layers)]
    stated = [[layer.values.get(key, _default(layer, key)) for key in used] for layer in layers]
    cells = [["×".join(map(str, x)) if isinstance(x, list) else str(x) for x in row] for row in stated]
    return ExactGrid.of(cells, names, used)


def _default(layer: ProblemSource, key: str) -> int | str:
    """Return what a layer has if its file does not state it; "-" if it has no such size."""
    has_kernel = "kernel" in layer.values
    return {"stride": 1, "padding": 0}.get(key, "-") if has_kernel else "-"


def _apply(layer: ProblemSource, before: LayerOutput, i: int) -> tuple[LayerOutput, nn.Module]:
    layer.allow_keys("type", "name", "filters", "kernel", "stride", "padding", "outputs", "bias")
    layer_type = layer.choice("type", _LAYERS)
    name = layer.text("name", f"{layer_type} {i + 1}")
    bias = layer.flag("bias", True)
    if layer_type == "flatten":
        size = before.channels * before.size[0] * before.size[1]
        # Receptive field of all outputs: that of the first one plus one jump per further output.
        field = tuple(r + (n - 1) * j for r, n, j in zip(before.field, before.size, before.jump, strict=True))
        return LayerOutput(name, size, (1, 1), field=field, jump=before.jump, flat=True), nn.Flatten()
    if layer_type == "linear":
        outputs = layer.integer("outputs", most=10**6)
        if before.size != (1, 1):
            slip = f"follows {before.name}, whose output is not flat"
            layer.fail(None, f"a linear layer {slip}; put a flatten layer between")
        # A map of size 1 × 1 counts as flat.
        module = nn.Sequential(nn.Flatten(), nn.Linear(before.channels, outputs, bias=bias, device="meta"))
        weights = outputs * (before.channels + bias)
        return replace(before, name=name, channels=outputs, weights=weights, derivation="", flat=True), module
    if before.flat:
        layer.fail(
            None,
            f"a layer of type {layer_type} follows {before.name}, whose output is flat; put it before that",
        )
    kernel, padding = _pair(layer, "kernel", None), _pair(layer, "padding", 0)
    stride = _pair(layer, "stride", 1 if layer_type == "convolution" else None)
    sizes, derivation = [], []
    for n, k, s, p in zip(before.size, kernel, stride, padding, strict=True):
        if n + 2 * p < k:
            layer.fail("kernel", f"the kernel is {k} long and its input with padding is {n + 2 * p}; make it shorter")
        sizes.append((n + 2 * p - k) // s + 1)
        derivation.append(f"⌊({n} + {2 * p} − {k}) / {s}⌋ + 1 = {sizes[-1]}")
    field = tuple(r + (k - 1) * j for r, k, j in zip(before.field, kernel, before.jump, strict=True))
    jump = tuple(j * s for j, s in zip(before.jump, stride, strict=True))
    after = LayerOutput(name, before.channels, tuple(sizes), 0, field, jump, " by ".join(derivation))
    if layer_type == "convolution":
        filters = layer.integer("filters", most=10**6)
        weights = filters * (kernel[0] * kernel[1] * before.channels + bias)
        convolution = nn.Conv2d(before.channels, filters, kernel, stride, padding, bias=bias, device="meta")
        return replace(after, channels=filters, weights=weights), convolution
    for n, k in zip(padding, kernel, strict=True):
        if 2 * n > k:
            layer.fail(
                "padding", f"padding {n} is more than half of the kernel {k}; expected at most half of the kernel"
            )
    pool = (
        nn.AvgPool2d(kernel, stride, padding) if layer_type == "average-pool" else nn.MaxPool2d(kernel, stride, padding)
    )
    return after, pool


def _pair(layer: ProblemSource, key: str, default: int | None) -> tuple[int, int]:
    if default is None:
        layer.require_keys(key)
    value = layer.values.get(key, default)
    pair: list[Any] = value if isinstance(value, list) else [value, value]
    least = 0 if key == "padding" else 1
    if len(pair) != 2 or not all(type(n) is int and least <= n <= 10**6 for n in pair):
        layer.fail(key, f"{key} must be a whole number or two, [height, width], from {least}")
    return pair[0], pair[1]
