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

from clearhead import analysis, masks
from clearhead._core.validation import NonNegativeInt, Range, did_you_mean, require
from clearhead.analysis.reports import attention_layers
from clearhead.attention import Softmax
from clearhead.config import Validated
from clearhead.errors import ConfigError
from clearhead.explorer.actions import RequestContext
from clearhead.explorer.model_panel import Reading, Text, answered, reading
from clearhead.nn import MultiHeadAttention

_SHOWN = 8
_SIDE = 64  # cells of a map
_KINDS: dict[str, Any] = {
    "off": analysis.ZeroAblation,
    "scale": analysis.ReplaceActivation,
    "patch": analysis.PatchActivation,
}


@dataclass(frozen=True, kw_only=True)
class Edit(Validated):
    """One part of the model: some heads of an attention layer, or what a whole module gives."""

    path: str
    heads: tuple[NonNegativeInt, ...] = ()
    positions: tuple[NonNegativeInt, ...] = ()
    how: Literal["off", "scale", "patch"] = "off"
    by: Annotated[float, Range(ge=-100, le=100)] = 0.0


@dataclass(frozen=True, kw_only=True)
class Changed(Text):
    edits: tuple[Edit, ...] = ()
    other: str = ""  # the text that patches come from
    mask: str = ""
    temperature: Annotated[float, Range(gt=0, le=1000)] = 1.0
    forced: NonNegativeInt | None = None  # a position, and the token that stands there instead
    token: str = ""
    path: str = ""  # the layer whose weights are shown
    head: NonNegativeInt | None = None

    def validate(self) -> None:
        require(len(self.edits) <= 64, f"there are {len(self.edits)} edits; expected at most 64")


@torch.no_grad()
def change(given: Changed, context: RequestContext) -> dict[str, Any]:
    """Both runs: what each expects next, the weights of one layer, and what moved everywhere."""
    now = answered(reading(given, context))
    model: Any = now.trained.model
    layers = attention_layers(model)
    for edit in given.edits:
        _check(edit, model, layers)
    shown = given.path or list(layers)[-1]
    require(shown in layers, f"there is no attention layer {given.path!r}; {did_you_mean(given.path, layers)}")
    with analysis.trace(model, *_parts(shown)) as before:
        model(*now.inputs)
    context.checkpoint()
    then, other, source = _forced(given, now), None, None
    if patched := _patched(given):
        other = answered(reading(replace(given, text=given.other), context))
        _check_lengths(given, now, other)
        with analysis.trace(model, *patched) as source:
            model(*other.inputs)
    after = analysis.trace(model, *_parts(shown))
    for edit in given.edits:
        after.intervene(edit.path, _made(edit, source))
    with _other(layers, given.mask, given.temperature), after:
        model(*then.inputs)
    context.checkpoint()
    moved = analysis.compare(before, after)
    kl = moved.logits.kl[0].tolist() if moved.logits else []
    return {
        "before": _told(now, before, shown, given.head),
        "after": _told(then, after, shown, given.head),
        "moved": moved.to_dict() | {"kl": [x if math.isfinite(x) else None for x in kl]},
        "python": script(given, now, then, other, shown),
    }


def _parts(shown: str) -> tuple[str, ...]:
    """What is recorded of both runs: the weights of the layer that is shown, and what every block gives."""
    return f"{shown}.weights", "**.blocks.*.output", "output"


def _check(edit: Edit, model: nn.Module, layers: dict[str, MultiHeadAttention]) -> None:
    paths = dict(model.named_modules())
    require(edit.path in paths, f"there is no module {edit.path!r}; {did_you_mean(edit.path, paths)}")
    if edit.heads:
        require(edit.path in layers, f"{edit.path} has no heads; choose an attention layer")
        most = layers[edit.path].n_heads
        require(max(edit.heads) < most, f"{edit.path} has heads 0 to {most - 1}, got {max(edit.heads)}")


def _made(edit: Edit, source: analysis.Trace | None) -> analysis.Intervention:
    first: dict[str, list[Any]] = {"off": [], "scale": [lambda x: edit.by * x], "patch": [source]}
    where = {"heads": list(edit.heads) or None, "positions": list(edit.positions) or None}
    made: analysis.Intervention = _KINDS[edit.how](*first[edit.how], **where)
    return made


def _check_lengths(given: Changed, now: Reading, other: Reading) -> None:
    """A patch of all positions needs as many in the second text."""
    for edit in given.edits:
        of_source = edit.path.startswith("encoder")
        theirs, mine = (len(one.source if of_source else one.ids) for one in (other, now))
        require(
            edit.how != "patch" or bool(edit.positions) or theirs == mine,
            f"the second text has {theirs} tokens and this one {mine}; make them as long, or give positions",
        )


def _patched(given: Changed) -> list[str]:
    """What has to be recorded of the second text."""
    return [f"{edit.path}.{'weights' if edit.heads else 'output'}" for edit in given.edits if edit.how == "patch"]


def _forced(given: Changed, now: Reading) -> Reading:
    """The reading with another token at one place."""
    if given.forced is None:
        return now
    require(given.forced < len(now.ids), f"there is no token {given.forced}; expected 0 to {len(now.ids) - 1}")
    ids = now.trained.tokenizer.encode(given.token)
    require(len(ids) == 1, f"{given.token!r} is {len(ids)} tokens for {now.trained.name}; expected exactly one")
    return replace(now, ids=[*now.ids[: given.forced], ids[0], *now.ids[given.forced + 1 :]])


@contextlib.contextmanager
def _other(layers: dict[str, MultiHeadAttention], mask: str, temperature: float) -> Iterator[None]:
    """Another mask in every layer of self-attention, another temperature in all, until the block ends."""
    given = {"mask": masks.parse(mask)} if mask.strip() else {}
    with contextlib.ExitStack() as stack:
        for path, layer in layers.items():
            if given and not path.endswith("cross_attention"):
                other = layer.register_forward_pre_hook(lambda _, args, named: (args, named | given), with_kwargs=True)
                stack.callback(other.remove)
            if temperature != 1.0:
                if not isinstance(layer.normalizer, Softmax):
                    raise ConfigError("the temperature is that of a softmax, and this model weighs in another way")
                stack.callback(setattr, layer, "normalizer", layer.normalizer)
                layer.normalizer = replace(layer.normalizer, temperature=temperature)
        yield


def _told(now: Reading, trace: analysis.Trace, path: str, head: int | None) -> dict[str, Any]:
    chances = trace.output("")[0, -1].double().softmax(-1)
    best = chances.topk(min(_SHOWN, len(chances)))
    names = now.trained.tokenizer.tokens(best.indices)
    following = zip(best.indices.tolist(), names, best.values.tolist(), strict=True)
    weights = trace.weights(path, heads=head)[0].mean(0)  # (T, S)
    if max(weights.shape) > _SIDE:
        size = tuple(min(n, _SIDE) for n in weights.shape)
        weights = nn.functional.adaptive_max_pool2d(weights[None].float(), size)[0]
    return now.labels() | {
        "next": [{"id": i, "token": name, "p": p} for i, name, p in following],
        "weights": [[round(255 * math.sqrt(w)) for w in row] for row in weights.tolist()],
        "path": path,
        "head": head,
    }


_MASKED = """mask = masks.parse({0!r})
for path, layer in layers.items():
    if not path.endswith("cross_attention"):
        other_mask = lambda _, args, named: (args, named | {{"mask": mask}})
        layer.register_forward_pre_hook(other_mask, with_kwargs=True)"""
_WARMED = """for layer in layers.values():
    layer.normalizer = dataclasses.replace(layer.normalizer, temperature={0!r})"""


def script(given: Changed, now: Reading, then: Reading, other: Reading | None, shown: str) -> str:
    """The Python that makes both runs and prints what moved."""
    begin = "with torch.no_grad(), analysis.trace(model, *{0}) as {1}:"
    call = "    model(source, ids)" if now.source else "    model(ids)"
    lines = ["import dataclasses", "", "import torch", "", "from clearhead import analysis, hub, masks", ""]
    lines += [f"model = hub.pipeline({given.model!r}).model"]
    lines += [f"source = torch.tensor([{now.source}])"] if now.source else []
    lines += [f"ids = torch.tensor([{now.ids}])", f"parts = {_parts(shown)!r}", begin.format("parts", "before"), call]
    if other is not None:
        rows = ", ".join(f"torch.tensor({x.tolist()})" for x in other.inputs)
        lines += [begin.format(_patched(given), "other"), f"    model({rows})"]
    if given.forced is not None:
        lines += [f"ids[0, {given.forced}] = {then.ids[given.forced]}"]
    if given.mask.strip() or given.temperature != 1.0:
        lines += ["layers = {p: m for p, m in model.named_modules() if type(m).__name__ == 'MultiHeadAttention'}"]
    lines += [_MASKED.format(given.mask)] if given.mask.strip() else []
    lines += [_WARMED.format(given.temperature)] if given.temperature != 1.0 else []
    lines += [begin.format("parts", "after")]
    lines += [f"    after.intervene({edit.path!r}, {_written(edit)})" for edit in given.edits]
    return "\n".join([*lines, call, "print(analysis.compare(before, after))", ""])


def _written(edit: Edit) -> str:
    where = [f"{name}={list(value)!r}" for name in ("heads", "positions") if (value := getattr(edit, name))]
    first = {"off": [], "scale": [f"lambda x: {edit.by!r} * x"], "patch": ["other"]}[edit.how]
    return f"analysis.{_KINDS[edit.how].__name__}({', '.join([*first, *where])})"
