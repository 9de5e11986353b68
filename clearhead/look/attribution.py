"""Direct logit attribution: which head and which feed-forward layer moved an answer, and by how much.

A logit is a sum over everything that was written into the residual stream, once the scale of each norm on the way is
taken as the run had it (see `stream`). With embeddings, positions and biases the parts add up to it but for rounding.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.errors import ConfigError, ShapeError
from clearhead.look.chart import Chart, HasCharts, bar_chart, head_chart, pad_ragged
from clearhead.look.question import LogitMetric, ModelArgs, input_tensors
from clearhead.look.stream import ResidualStream, Term, record_residual_stream
from clearhead.look.trace import Trace, trace

Kind = Literal["embedding", "head", "attention", "feed-forward", "layer", "bias"]


@dataclass(frozen=True)
class LogitContribution:
    """What one thing added to the answer. `path` is the module or parameter; `layer` the number of its block."""

    kind: Kind
    path: str
    value: float
    layer: int | None = None
    head: int | None = None

    @property
    def name(self) -> str:
        """In a few words: the block's number and what it is, or the path of what stands outside of the blocks."""
        if self.head is not None:
            return f"{self.layer}.{self.head} {self.path.rpartition('.')[2]}"
        if self.layer is None:
            return self.path
        return f"{self.layer} {re.sub(r'^.*?[.]' + str(self.layer) + '[.]', '', self.path)}"


@dataclass(frozen=True, kw_only=True)
class Attribution(HasCharts):
    """All parts of one answer, in the order in which they were written; `total` of them and `rest` make the logit."""

    answer: LogitMetric
    logit: float
    parts: tuple[LogitContribution, ...]
    tolerance: float  # how large `rest` may be: what rounding can explain

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return math.fsum(part.value for part in self.parts)

    @property
    def rest(self) -> float:
        """What of the logit is no part's: rounding."""
        return self.logit - self.total

    @property
    def largest(self) -> list[LogitContribution]:
        """The parts by how far they moved the answer, whichever way."""
        return sorted(self.parts, key=lambda part: -abs(part.value))

    def heads(self) -> tuple[tuple[str, ...], Tensor]:
        """The attention layers, and (layers, heads) what each of their heads added; NaN where a layer has fewer."""
        found = [part for part in self.parts if part.head is not None]
        if not found:
            raise ConfigError("no head of this model could be told apart; its layers are in `parts` as a whole")
        paths = tuple(dict.fromkeys(part.path for part in found))
        return paths, pad_ragged([part.value for part in found if part.path == path] for path in paths)

    def charts(self, *, most: int = 24) -> list[Chart]:
        """The parts that moved the answer most, and all heads."""
        parts = [(part.name, part.value) for part in self.largest[:most]]
        others = math.fsum(part.value for part in self.largest[most:]) + self.rest
        note = f"All parts together are {self.logit:.4g}, the answer; rounding left {self.rest:.1g} of it."
        charts = [bar_chart("What moved the answer most", [*parts, ("all others", others)], note)]
        if any(part.head is not None for part in self.parts):
            paths, values = self.heads()
            charts.append(head_chart("What each head added", paths, values, signed=True))
        return charts

    def to_dict(self) -> dict[str, Any]:
        """As `clearhead look --view attribution --json` prints it."""
        answer = {"token": self.answer.token, "baseline": self.answer.baseline, "position": self.answer.position}
        kinds = [{"name": part.name, **vars(part)} for part in self.parts]
        return {"answer": answer, "logit": self.logit, "total": self.total, "rest": self.rest, "parts": kinds}


def attribute(model: nn.Module, given: ModelArgs, answer: LogitMetric | None = None) -> Attribution:
    """What each part of a model added to one logit (or the difference of two), from one run over one sequence.

        found = look.attribute(model, ids, look.LogitMetric(token=17, baseline=4))
        found.largest[0]                       # LogitContribution(kind="head", path="blocks.3.attention", head=5, …)
        found.total + found.rest               # the logit itself

    Norms are linear once their scale is known, and theirs is that of the run; their biases are parts of their own. The
    same goes for embeddings, positions, and the bias of every output projection. A head is told apart where the input
    of its layer's output projection is what the heads gave, side by side."""
    answer = LogitMetric() if answer is None else answer
    batch = {x.shape[0] for x in input_tensors(given) if x.dim()}
    if batch != {1}:
        raise ShapeError(f"got a batch of {max(batch, default=0)} to attribute; give one sequence, such as ids[:1]")
    with torch.inference_mode(False), trace(model) as attended:
        stream = record_residual_stream(model, given)
    answer = answer.resolve(stream.logits)
    with torch.inference_mode(False), torch.enable_grad():
        logits = stream.logits.detach().requires_grad_()
        asked = answer.as_tensor(logits)
        (gradient,) = torch.autograd.grad(asked, logits)
        terms, logit = stream.terms(gradient), float(asked.detach())
    parts = sorted((part for leaf in reversed(terms) for part in _parts(leaf, stream, attended)), key=_place)
    # A sum of n terms errs by about √n roundings of what it sums up; here these are products of features.
    n_terms = len(terms) + stream.logits.shape[-1] + max(leaf.value.shape[-1] for leaf in terms if leaf.value.dim())
    size = math.fsum(float(leaf.shares.abs().sum()) for leaf in terms)
    tolerance = math.sqrt(n_terms) * stream.rounding * max(size, abs(logit))
    found = Attribution(answer=answer, logit=logit, parts=tuple(parts), tolerance=tolerance)
    if not abs(found.rest) <= tolerance or all(part.layer is None for part in parts):
        last = next((leaf.step.name for leaf in terms if leaf.step is not None), "nothing")
        raise ConfigError(
            "this answer cannot be shared out: between its blocks and its logits the model does something that is no "
            f"sum (parts of {found.total:.6g} are found of {found.logit:.6g}, the last one made by {last}); the logit "
            "lens and patching need no sums"
        )
    return found


def _parts(leaf: Term, stream: ResidualStream, attended: Trace) -> list[LogitContribution]:
    """A leaf as parts: the heads of an attention layer and its bias, or the leaf itself."""
    layer = next((i for i, block in enumerate(stream.blocks) if leaf.path.startswith(f"{block}.")), None)
    value = float(leaf.shares.sum())
    if leaf.step is None and leaf.value.dim() < 2:
        return [LogitContribution("bias", leaf.path, value, layer)]
    if leaf.step is None or layer is None:
        return [LogitContribution("embedding", leaf.path, value, layer)]
    inside = [path for path in attended.paths if f"{path}.".startswith(f"{leaf.path}.")]
    if not inside:  # where attention is written out, it is not seen
        return [LogitContribution("feed-forward" if attended.paths else "layer", leaf.path, value, layer)]
    shares = _by_head(leaf, attended.heads(inside[0])) if len(inside) == 1 else None
    if shares is None:
        return [LogitContribution("attention", leaf.path, value, layer)]
    heads = [LogitContribution("head", leaf.path, share, layer, head) for head, share in enumerate(shares)]
    bias = LogitContribution("bias", f"{leaf.path} (output bias)", value - math.fsum(shares), layer)
    return heads if leaf.step.product[2] is None else [*heads, bias]


def _place(part: LogitContribution) -> float:
    """What is written earlier comes first; what is added to all of it, such as the last norm's bias, at the end."""
    if part.layer is not None:
        return part.layer
    return -1 if part.kind == "embedding" else math.inf


def _by_head(leaf: Term, heads: Tensor) -> list[float] | None:
    """What each head added through the output projection that made this leaf; None where it read something else."""
    step = leaf.step
    if step is None or step.name not in ("linear", "addmm"):
        return None
    x, matrix, _ = step.product
    H, joined = heads.shape[-3], heads.transpose(-2, -3).flatten(-2)  # (B, T, H·E)
    if x.numel() != joined.numel() or not torch.equal(x.reshape(joined.shape), joined):
        return None
    back = leaf.gradient.double() @ matrix.detach().double().mT  # at what the projection read
    return (back * x.double()).flatten(0, -2).sum(0).unflatten(0, (H, -1)).sum(-1).tolist()
