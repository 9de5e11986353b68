"""A recording of a run, made from outside: `with look.trace(model) as t: model(...)`.

The run itself stays on the fast path, which never has the attention weights. A trace keeps what attention was given (by
reference: nothing is copied or computed while the model runs) and the outputs and inputs that were asked for. Weights
are recomputed from that with the reference equation when they are asked for, for those heads and rows only, and
`difference` says how far they are from what really ran. What the model has written over since (x += y) is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._shapes import Float
from clearhead.attention.kernels.call import Call
from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.look import recompute
from clearhead.look.edit import Intervention
from clearhead.look.recompute import AttentionCall, Indices, VersionedRef, resolve_indices, select_indices
from clearhead.look.record import (
    RecordedRun,
    RecordStore,
    can_attend,
    concat_steps,
    is_attention_layer,
    resolve_patterns,
    split_by_step,
)
from clearhead.look.watch import AttentionRecorder
from clearhead.tables import Markup, Printed, html_table, table
from clearhead.values import require

_SMALL = 48  # positions, beyond which a picture in a table is no help


class Trace:
    """What was kept of the runs inside its `with` block, by module path.

    A *run* is one call of the model, or one generation with a cache: its steps are stitched into one picture. `run=-1`
    is the last, 0 the first. After a beam search the rows are the beams that were alive at the last step."""

    def __init__(self, model: nn.Module, *patterns: str, runs: int | None = None) -> None:
        message = f"runs is {runs}; expected how many of the latest runs to keep, 1 or more, or None for all"
        require(runs is None or runs >= 1, message)
        if not isinstance(model, nn.Module):
            raise DtypeError(f"got a {type(model).__name__} to trace; expected a PyTorch module")
        self._modules = dict(model.named_modules())
        self._asked = resolve_patterns(self._modules, patterns)
        self._edits: dict[str, list[Intervention]] = {}
        kept = RecordStore(runs)
        self._kept = kept.runs
        self._watch = AttentionRecorder(self._modules, self._asked, self._edits, kept)

    # -- recording ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Trace:
        require(not self._watch.on, "this trace is recording already; make another with look.trace(model)")
        of_heads = [path for path, edits in self._edits.items() if any(e.heads is not None for e in edits)]
        paths = self._asked["output"] | self._asked["input"] | set(self._edits)
        attention_layers = self._attending([*self._asked["weights"], *of_heads])
        self._watch.start([*(self._modules[path] for path in paths), *attention_layers])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: Any) -> None:
        self._watch.stop()
        for path, edits in self._edits.items() if error is None else ():
            # An edit that nothing came of is an answer to another question than was asked.
            never = f"the edit of {path or 'the model'} was never made: it did not run, or has no heads of its own"
            require(self._watch.made.issuperset(edits), never)

    def intervene(self, path: str, edit: Intervention) -> Trace:
        """Change what a module gives from now on: see `Zero`, `Mean`, `Replace` and `Patch`. Give it before the run.

        An edit with `heads` changes what these heads of an attention layer give, before its output projection; one
        without changes the output of any module. Edits of one path are made in the order in which they are given."""
        if not isinstance(edit, Intervention):
            kind = type(edit).__name__
            raise DtypeError(
                f"got a {kind} for an edit; expected ZeroAblation, MeanAblation, ReplaceActivation or PatchActivation"
            )
        path = self._known(path, "output")
        if edit.heads is not None and not can_attend(self._modules[path]):
            layers = ", ".join(name for name, module in self._modules.items() if is_attention_layer(module))
            raise ConfigError(f"{path} has no heads; edit an attention layer: {layers or 'this model has none'}")
        self._edits.setdefault(path, []).append(edit)
        if self._watch.on:
            for module in (self._modules[path], *self._attending([path] if edit.heads is not None else [])):
                self._watch.hook(module)
        return self

    def _attending(self, paths: Sequence[str]) -> list[nn.Module]:
        """The modules to watch for attention at these paths. A layer is watched alone; that others attend is known when
        they do, and a call is filed under the innermost module that runs: all that may attend are watched."""
        wanted = [self._modules[path] for path in paths]
        if all(is_attention_layer(module) for module in wanted):
            return wanted
        return [module for module in self._modules.values() if can_attend(module)]

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def paths(self) -> list[str]:
        """The attention layers that are recorded; other modules that attend join them once they have run."""
        return [
            path
            for path, module in self._modules.items()
            if path in self._asked["weights"] and (is_attention_layer(module) or path in self._kept["weights"])
        ]

    @property
    def outputs(self) -> list[str]:
        """The modules whose outputs are recorded."""
        return [path for path in self._modules if path in self._asked["output"]]

    @property
    def runs(self) -> int:
        """How many runs of the attention layers there are, or of the other modules where no layer is recorded."""
        kept = [self._kept["weights"]] if self._kept["weights"] else self._kept.values()
        return max((len(runs) for by_path in kept for runs in by_path.values()), default=0)

    def module(self, path: str) -> nn.Module:
        """The module of the model at this path."""
        return self._modules[self._known(path)]

    # -- attention ----------------------------------------------------------------------------------------------------

    def weights(
        self, path: str, *, heads: Indices = None, rows: Indices = None, run: int = -1
    ) -> Float[Tensor, "*B h r S"]:
        """Who attended to whom in this layer: recomputed, for these heads and rows only, before any dropout.

        Of a stitched run, rows are all queries one under another; a key that a row could not know yet has weight 0."""
        made, last, picked, wanted = self._part(path, run, heads, rows)
        if len(made.steps) == 1 and made.steps[0].places is None:
            return recompute.recompute_weights(last.call, picked, wanted, last.wide)
        shape = (made.size, len(picked), len(wanted), max(step.value.call.S for step in made.steps))
        whole = torch.zeros(shape, dtype=last.wide, device=last.call.q.device)
        for step, places, own in split_by_step(made, wanted):
            part = recompute.recompute_weights(step.value.call, picked, own, step.value.wide)  # (batch, h, r, own keys)
            whole[:, :, places, : part.shape[-1]] = step.align_rows(part).to(whole.dtype)
        return whole

    def weight_blocks(self, path: str, head: int, *, run: int = -1) -> Iterator[tuple[int, Float[Tensor, "*B r S"]]]:
        """One head's weights in pieces that fit in memory at any length: the first row of each, and its rows."""
        made = self._run(path, run)
        for part in recompute.row_blocks(made.steps[-1].value.call, 1, list(range(made.length))):
            yield part[0], self.weights(path, heads=head, rows=part, run=run).squeeze(-3)

    def values(self, path: str, *, heads: Indices = None, run: int = -1) -> Float[Tensor, "*B h S E"]:
        """The values that each head averaged; heads that share a key/value head have the same."""
        made, last, picked, _ = self._part(path, run, heads)
        return made.steps[-1].align_rows(recompute.expand_kv_heads(last.call, last.call.v, picked))

    def heads(self, path: str, *, heads: Indices = None, run: int = -1) -> Float[Tensor, "*B h T E"]:
        """What each head gave, before the output projection: what the fast path really made."""
        made, _, picked, _ = self._part(path, run, heads)
        return concat_steps(made, lambda attended: select_indices(attended.heads(), -3, picked))

    def attention_inputs(self, path: str, *, run: int = -1) -> Call:
        """What this layer's attention was given: q, k, v, mask and bias; of a run with a cache, at its last step."""
        return self._run(path, run).steps[-1].value.call

    def difference(self, path: str, *, heads: Indices = None, rows: Indices = None, run: int = -1) -> float:
        """The largest difference between recomputed weights times values and what the fast path gave for them.

        For `nn.MultiheadAttention`, whose heads cannot be seen one by one, the outputs of the layer are compared."""
        return self._compared(recompute.max_difference, path, heads, rows, run)

    def tolerance(self, path: str, *, heads: Indices = None, rows: Indices = None, run: int = -1) -> float:
        """How large `difference` may be, derived from what the reference itself errs against float64 in this dtype."""
        return self._compared(recompute.difference_tolerance, path, heads, rows, run)

    def report(self, *, rows: Indices = None, run: int = -1) -> str:
        """A table: for each layer what ran, and how far what follows from the recomputed weights is from what it gave.

        That computes every weight once more, or those of some queries (`rows`). Without attention, it says why."""
        if not self.paths:
            return Printed(self._why_none())
        lines = [("layer", "heads", "queries × keys", "what ran", "weights · values off by", "allowed")]
        for path in self.paths:
            error = self.difference(path, rows=rows, run=run)
            bound = self.tolerance(path, rows=rows, run=run)
            lines.append((path or "the model", *self._ran(path, run), f"{error:.1e}", f"{bound:.1e}"))
        note = "The weights are recomputed from what attention was given."
        return Printed(table(lines, right=(1, 2, 4, 5)) + f"\n{note}")

    def _ran(self, path: str, run: int) -> tuple[str, str, str]:
        """The heads of a layer, its queries and keys, and what ran, in words."""
        made = self._run(path, run)
        last = made.steps[-1].value
        return str(last.call.q.shape[-3]), f"{made.length} × {last.call.S}", last.how

    def _why_none(self) -> str:
        """Why there is no attention layer in this trace."""
        if not self._asked["weights"]:
            return "No attention is recorded: only outputs or inputs were asked for. Ask for weights: **.weights"
        if not self._watch.has_run:
            return "Nothing has run inside this trace: call the model in its `with` block."
        return (
            "No attention was seen. Seen are clearhead's attend and MultiHeadAttention, and torch's "
            "scaled_dot_product_attention and nn.MultiheadAttention, where the model's own files call them; attention "
            "that is written out, softmax(q @ k.T) @ v, is not: call one of these in its place."
        )

    # -- outputs and inputs -------------------------------------------------------------------------------------------

    def output(self, path: str = "", *, run: int = -1) -> Tensor:
        """What a module returned (the first tensor, where it returned several), stitched along the sequence."""
        return concat_steps(self._run(path, run, "output"), VersionedRef.only)

    def input(self, path: str = "", *, run: int = -1) -> Tensor:
        """The first tensor that a module was given, stitched along the sequence."""
        return concat_steps(self._run(path, run, "input"), VersionedRef.only)

    def norms(self, *, run: int = -1) -> list[tuple[str, Float[Tensor, "*B T"]]]:
        """The length of the residual stream's vectors after each block whose output was recorded."""
        parents = {path: self._modules[path.rpartition(".")[0]] for path in self.outputs if path}
        blocks = [path for path, parent in parents.items() if isinstance(parent, (nn.ModuleList, nn.Sequential))]
        example = 'for example look.trace(model, "**.blocks.*.output")'
        require(bool(blocks), f"no block is recorded; ask for their outputs, {example}")
        return [(path, self.output(path, run=run).norm(dim=-1)) for path in blocks]

    # -- finding ------------------------------------------------------------------------------------------------------

    def _run(self, path: str, run: int, kind: str = "weights") -> RecordedRun:
        """What was kept of one run of a module: its "weights", "output" or "input"."""
        kept, asked, path = self._kept[kind], self._asked[kind], self._known(path, kind)
        if path not in asked:
            recorded = self.paths if kind == "weights" else sorted(asked)
            what = "attention weights were" if kind == "weights" else f"{kind} was"
            raise ConfigError(
                f"no {what} recorded for {path or 'the model'}; recorded: "
                f"{', '.join(name or 'the model itself' for name in recorded) or 'none'}"
            )
        if path not in kept and kind == "weights" and not self.paths:
            raise ShapeError(f"there are no weights of {path or 'the model'}. {self._why_none()}")
        if path not in kept:
            raise ShapeError(
                f"{path or 'the model'} has not {'attended' if kind == 'weights' else 'run'} inside this trace; "
                "call the model in its `with` block first (what torch.compile has compiled may run unseen)"
            )
        found = kept[path]
        if not -len(found) <= run < len(found):
            raise ShapeError(f"run {run} was asked for; {path or 'the model'} has {len(found)}: 0 … {len(found) - 1}")
        return found[run]

    def _part(
        self, path: str, run: int, heads: Indices, rows: Indices = None
    ) -> tuple[RecordedRun, AttentionCall, list[int], list[int]]:
        """A run of a layer, what its last step was, and which heads and rows are meant."""
        made = self._run(path, run)
        last: AttentionCall = made.steps[-1].value
        return (
            made,
            last,
            resolve_indices(heads, last.call.q.shape[-3], "head"),
            resolve_indices(rows, made.length, "row"),
        )

    def _compared(
        self,
        how: Callable[[AttentionCall, list[int], list[int]], float],
        path: str,
        heads: Indices,
        rows: Indices,
        run: int,
    ) -> float:
        made, last, picked, wanted = self._part(path, run, heads, rows)
        what = path or "the model"
        if dropout := recompute.dropout_of(last.call):
            raise ConfigError(
                f"{what} dropped weights at random (dropout {dropout:g}), which cannot be done again: its weights are "
                "those before dropout, and are compared in evaluation mode (model.eval())"
            )
        all_of_them = not last.whole or len(picked) == last.call.q.shape[-3]
        require(all_of_them, f"{what} joins its heads before they can be seen; compare all of them: leave heads out")
        return max((how(step.value, picked, own) for step, _, own in split_by_step(made, wanted)), default=0.0)

    def _known(self, path: str, ending: str = "") -> str:
        """A path without its ending, or the error that it is none."""
        if path not in self._modules:
            path = path.removesuffix(f".{ending}")
        if path not in self._modules:
            raise ConfigError(
                f"{path!r} is not recorded: the model has no module of that name; "
                f"recorded attention layers are: {', '.join(self.paths) or 'none'}"
            )
        return path

    def __repr__(self) -> str:
        sizes = f"Trace({len(self.paths)} attention layers, {len(self.outputs)} outputs, {self.runs} runs)"
        return sizes if self.paths or self.outputs else f"{sizes}: {self._why_none()}"

    def _repr_html_(self) -> str:
        """In a notebook: what is recorded of the last run, with a small picture of each layer that is short enough."""
        rows = [("recorded", "heads", "queries × keys", "what ran", "mean over the heads")]
        attended = [path for path in self.paths if path in self._kept["weights"]]
        rows += [(path, *self._ran(path, -1), self._thumbnail(path)) for path in attended]
        shapes = {path: tuple(self.output(path).shape) for path in self.outputs if path in self._kept["output"]}
        rows += [(f"{path or 'the model'} output", "", str(shape), "", "") for path, shape in shapes.items()]
        return html_table(rows, right=(1, 2), caption=repr(self)) if len(rows) > 1 else f"<p>{escape(repr(self))}</p>"

    def _thumbnail(self, path: str) -> str:
        made = self._run(path, -1)
        T, S = made.length, made.steps[-1].value.call.S
        if not 0 < max(T, S) <= _SMALL:
            return ""
        weights = self.weights(path).detach().float().flatten(0, -4)[0].mean(0)
        squares = "".join(
            f'<rect x="{j}" y="{i}" width="1" height="1" fill-opacity="{weights[i, j]:.2f}"/>'
            for i, j in (weights >= 0.01).nonzero().tolist()
        )
        size = f'viewBox="0 0 {S} {T}" width="{max(48, min(2 * S, 96))}"'
        return Markup(f'<svg {size} style="outline:1px solid #8888" fill="currentColor" role="img">{squares}</svg>')


def trace(model: nn.Module, *patterns: str, runs: int | None = None) -> Trace:
    """Record a run of `model`: what the patterns name, or without any the weights of every attention layer.

    `"blocks.*.attention.weights"`, `"blocks.*.output"`, `"head.input"`: see `clearhead.look.record`. `runs` is how
    many of the latest runs to keep; by default all of them."""
    return Trace(model, *patterns, runs=runs)
