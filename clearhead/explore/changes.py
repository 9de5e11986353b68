"""The panel of changes: the same text twice, as the model is and with something changed, and what that moved.

What is changed is changed from outside, as `look` does it, and the answer has the Python that does the same."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import nn

from clearhead import look, masks
from clearhead.attention import MultiHeadAttention, Softmax
from clearhead.config import Value
from clearhead.errors import ConfigError
from clearhead.explore.readings import Reading, Text, answered, attending, reading, reading_of
from clearhead.explore.run import Run, read
from clearhead.values import Natural, Range, did_you_mean, require

_PARTS = ("**.*attention.weights", "**.blocks.*.output", "output")
_SHOWN = 8
_SIDE = 64  # cells of a map


@dataclass(frozen=True, kw_only=True)
class Edit(Value):
    """One part of the model: some heads of an attention layer, or what a whole module gives."""

    path: str
    heads: tuple[Natural, ...] = ()
    positions: tuple[Natural, ...] = ()
    how: Literal["off", "scale", "patch"] = "off"
    by: Annotated[float, Range(least=-100, most=100)] = 0.0


@dataclass(frozen=True, kw_only=True)
class Changed(Text):
    edits: tuple[Edit, ...] = ()
    other: str = ""  # the text that patches come from
    mask: str = ""
    temperature: Annotated[float, Range(above=0, most=1000)] = 1.0
    forced: Natural | None = None  # a position, and the token that stands there instead
    token: str = ""
    path: str = ""  # the layer whose weights are shown
    head: Natural | None = None

    def validate(self) -> None:
        require(len(self.edits) <= 64, f"there are {len(self.edits)} edits; expected at most 64")


@torch.no_grad()
def change(ask: dict[str, Any], run: Run) -> dict[str, Any]:
    """Both runs: what each expects next, the weights of one layer, and what moved everywhere."""
    given = read(ask, Changed)
    now = answered(reading_of(given, run))
    model: Any = now.trained.model
    layers = attending(model)
    for edit in given.edits:
        _check(edit, model, layers)
    shown = given.path or list(layers)[-1]
    require(shown in layers, f"there is no attention layer {given.path!r}; {did_you_mean(given.path, layers)}")
    with _trace(model) as before:
        model(*now.inputs)
    run.step()
    then = _forced(given, now)
    source = _source(given, now, model, run) if any(edit.how == "patch" for edit in given.edits) else None
    after = _trace(model)
    for edit in given.edits:
        after.edit(edit.path, _made(edit, source))
    with _mask(layers, given.mask), _temperature(layers, given.temperature), after:
        model(*then.inputs)
    run.step()
    moved = look.compare(before, after)
    return {
        "before": _told(now, before, shown, given.head),
        "after": _told(then, after, shown, given.head),
        "moved": moved.to_dict() | {"kl": _finite(moved.logits.kl[0].tolist()) if moved.logits else []},
        "python": script(given, now),
    }


def _trace(model: nn.Module) -> look.Trace:
    return look.trace(model, *_PARTS)


def _check(edit: Edit, model: nn.Module, layers: dict[str, MultiHeadAttention]) -> None:
    paths = [path for path, _ in model.named_modules()]
    require(edit.path in paths, f"there is no module {edit.path!r}; {did_you_mean(edit.path, paths)}")
    if edit.heads:
        require(edit.path in layers, f"{edit.path} has no heads; choose an attention layer")
        most = layers[edit.path].n_heads
        require(max(edit.heads) < most, f"{edit.path} has heads 0 to {most - 1}, got {max(edit.heads)}")


def _made(edit: Edit, source: look.Trace | None) -> look.Edit:
    where: dict[str, Any] = {"heads": list(edit.heads) or None, "positions": list(edit.positions) or None}
    if edit.how == "off":
        return look.Zero(**where)
    if edit.how == "scale":
        return look.Replace(lambda x: edit.by * x, **where)
    assert source is not None
    return look.Patch(source, **where)


def _source(given: Changed, now: Reading, model: nn.Module, run: Run) -> look.Trace:
    """The run on the second text, which patches are taken from."""
    other = answered(reading(now.trained, given.other, given.written, run.shelf.limits.tokens))
    wanted = [f"{edit.path}.{'weights' if edit.heads else 'output'}" for edit in given.edits if edit.how == "patch"]
    for edit in given.edits:
        rows = other.source if edit.path.startswith("encoder") else other.ids
        mine = now.source if edit.path.startswith("encoder") else now.ids
        if edit.how == "patch" and not edit.positions and len(rows) != len(mine):
            raise ConfigError(
                f"the second text has {len(rows)} tokens and this one {len(mine)}; make them as long, or give positions"
            )
    with look.trace(model, *wanted) as source:
        model(*other.inputs)
    return source


def _forced(given: Changed, now: Reading) -> Reading:
    """The reading with another token at one place."""
    if given.forced is None:
        return now
    require(given.forced < len(now.ids), f"there is no token {given.forced}; expected 0 to {len(now.ids) - 1}")
    ids = now.trained.tokenizer.encode(given.token)
    require(len(ids) == 1, f"{given.token!r} is {len(ids)} tokens for {now.trained.name}; expected exactly one")
    return replace(now, ids=[*now.ids[: given.forced], ids[0], *now.ids[given.forced + 1 :]])


@contextlib.contextmanager
def _mask(layers: dict[str, MultiHeadAttention], text: str) -> Iterator[None]:
    """Another mask in every layer of self-attention."""
    if not text.strip():
        yield
        return
    mask = masks.parse(text)
    inner = [layer for path, layer in layers.items() if not path.endswith("cross_attention")]
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, named: (args, named | {"mask": mask}), with_kwargs=True)
        for layer in inner
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _temperature(layers: dict[str, MultiHeadAttention], value: float) -> Iterator[None]:
    """Another temperature in every layer."""
    kept = {path: layer.weights for path, layer in layers.items()}
    try:
        for layer in layers.values() if value != 1.0 else ():
            require(
                isinstance(layer.weights, Softmax), "the temperature is that of a softmax, and this model has another"
            )
            layer.weights = replace(layer.weights, temperature=value)  # type: ignore[type-var]
        yield
    finally:
        for path, layer in layers.items():
            layer.weights = kept[path]


def _told(now: Reading, trace: look.Trace, path: str, head: int | None) -> dict[str, Any]:
    chances = trace.output("")[0, -1].double().softmax(-1)
    best = chances.topk(min(_SHOWN, len(chances)))
    names = now.trained.tokenizer.tokens(best.indices.tolist())
    weights = trace.weights(path, heads=head)[0].mean(0)  # (T, S)
    if max(weights.shape) > _SIDE:
        size = tuple(min(n, _SIDE) for n in weights.shape)
        weights = nn.functional.adaptive_max_pool2d(weights[None].float(), size)[0]
    return now.labels() | {
        "next": [
            {"id": i, "token": name, "p": p}
            for i, name, p in zip(best.indices.tolist(), names, best.values.tolist(), strict=True)
        ],
        "weights": [[round(255 * math.sqrt(w)) for w in row] for row in weights.tolist()],
        "path": path,
        "head": head,
    }


def _finite(values: list[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def script(given: Changed, now: Reading) -> str:
    """The Python that makes both runs and prints what moved."""
    source, lines = (
        "source, " if now.source else "",
        ["import torch", "", "from clearhead import look, masks, pretrained", ""],
    )
    lines += [f"model = pretrained.load({given.model!r}).model"]
    lines += [f"source = torch.tensor([{now.source}])"] if now.source else []
    lines += [
        f"ids = torch.tensor([{now.ids}])",
        f"parts = {_PARTS!r}",
    ]
    lines += ["with torch.no_grad(), look.trace(model, *parts) as before:", f"    model({source}ids)"]
    if any(edit.how == "patch" for edit in given.edits):
        other = answered(reading(now.trained, given.other, given.written, 1 << 30))
        wanted = [f"{e.path}.{'weights' if e.heads else 'output'}" for e in given.edits if e.how == "patch"]
        rows = ", ".join(
            f"torch.tensor([{row}])" for row in ((other.source, other.ids) if now.source else (other.ids,))
        )
        lines += [f"with torch.no_grad(), look.trace(model, *{wanted!r}) as other:", f"    model({rows})"]
    if given.forced is not None:
        lines += ["ids = ids.clone()", f"ids[0, {given.forced}] = {_forced(given, now).ids[given.forced]}"]
    needs_layers = given.mask.strip() or given.temperature != 1.0
    if needs_layers:
        lines += ["layers = {p: m for p, m in model.named_modules() if type(m).__name__ == 'MultiHeadAttention'}"]
    if given.mask.strip():
        lines += [
            f"mask = masks.parse({given.mask!r})",
            "for path, layer in layers.items():",
            "    if not path.endswith('cross_attention'):",
            "        other_mask = lambda _, args, named: (args, named | {'mask': mask})",
            "        layer.register_forward_pre_hook(other_mask, with_kwargs=True)",
        ]
    if given.temperature != 1.0:
        lines += [
            "from dataclasses import replace",
            "",
            "for layer in layers.values():",
            f"    layer.weights = replace(layer.weights, temperature={given.temperature!r})",
        ]
    lines += ["with torch.no_grad(), look.trace(model, *parts) as after:"]
    lines += [f"    after.edit({edit.path!r}, {_written(edit)})" for edit in given.edits]
    return "\n".join([*lines, f"    model({source}ids)", "print(look.compare(before, after))", ""])


def _written(edit: Edit) -> str:
    where = [f"{name}={list(value)!r}" for name in ("heads", "positions") if (value := getattr(edit, name))]
    first = {"off": [], "scale": [f"lambda x: {edit.by!r} * x"], "patch": ["other"]}[edit.how]
    name = {"off": "Zero", "scale": "Replace", "patch": "Patch"}[edit.how]
    return f"look.{name}({', '.join([*first, *where])})"
