"""Build the steps of a walkthrough from the module calls of a run. Values and order are those of the run; no model is
special-cased.

A step is the output of a module, an operation inside an attention layer (recomputed from its inputs), or an operation
that the model's code performs between its modules. The latter are identified by their values: if the input of a module
is bit-identical to the sum of two earlier results, these were added. Pre-norm, post-norm and parallel blocks are
therefore recognized without configuration.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.analysis.tracing.recompute import recompute_scores
from clearhead.analysis.tracing.recorder import first_tensor
from clearhead.analysis.tracing.trace import Trace
from clearhead.analysis.walkthrough.steps import WalkthroughStep, texts
from clearhead.attention import ScaledDot
from clearhead.attention.inputs import AttentionInputs

NamedTensors = list[tuple[Tensor, int]]
"""What has been computed so far in one module, and by which station."""


@dataclass
class ModuleCall:
    """One call of a module: input tensors, output tensor, and the calls of its submodules."""

    path: str
    module: nn.Module
    given: list[Tensor]
    gave: Tensor | None = None
    parts: list[ModuleCall] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def all(self) -> Iterator[ModuleCall]:
        """The call and all calls inside it."""
        yield self
        for part in self.parts:
            yield from part.all


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal."""
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())


@contextmanager
def record_calls(model: nn.Module) -> Iterator[list[ModuleCall]]:
    """Record the calls of the model. Tensors are copied, because later operations may overwrite them.

    A module with two paths (shared embeddings) gets the path at which it is called.
    """
    calls: list[ModuleCall] = []
    running: list[ModuleCall] = []
    names: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(path)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        prefix = f"{running[-1].path}." if running and running[-1].path else ""
        path = next((path for path in names[module] if path.startswith(prefix)), names[module][0])
        tensors = [x for x in args if isinstance(x, Tensor)]
        tensors = tensors or [x for x in kwargs.values() if isinstance(x, Tensor)][:1]  # masks come later
        visit = ModuleCall(path, module, [x.detach().clone() for x in tensors])
        (running[-1].parts if running else calls).append(visit)
        running.append(visit)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        first = first_tensor(output)
        running.pop().gave = None if first is None else first.detach().clone()

    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield calls


class TokenAxis(NamedTuple):
    """An axis of tokens: symbol of its length, labels, and number of input tokens (the others were generated)."""

    letter: str
    tokens: Sequence[str]
    given: int


class WalkthroughBuilder:
    """Builds the steps from the calls of a traced run.

    `lines` maps prefixes of module paths to token axes, of which the first match is used: {"encoder": …, "": …}.
    """

    def __init__(self, trace: Trace, lines: Mapping[str, TokenAxis]) -> None:
        self._trace, self._lines = trace, lines
        self._steps: list[WalkthroughStep] = []
        self._ends: NamedTensors = []  # what stacks and blocks gave: a memory is one of these
        self._last: Tensor | None = None  # what the model itself gave
        self.sizes: dict[str, int] = {}

    @property
    def steps(self) -> list[WalkthroughStep]:
        """All steps. In formulas, a vector is h after a norm and x in the stream.

        A norm is in the stream if its result is added to or leaves a block, which is known only after all steps.
        """
        stream = {one.sources[0] for one in self._steps if one.role == "add"} | {i for _, i in self._ends}
        norms = {i for i, one in enumerate(self._steps) if one.role == "norm"}
        h = norms - stream
        memory = {one.sources[0] for one in self._steps if (one.branch, one.role) == ("cross-attention", "k")}
        done: list[WalkthroughStep] = []
        for i, one in enumerate(self._steps):
            own = i if one.role == "norm" else next(iter(one.sources), None)
            added = [done[j].formula.partition(" = ")[0] for j in one.sources[1:]]  # attention(h), feed_forward(h)
            words = {"h": "h" if own in h else "x", "added": " + ".join(added)}
            kind = "memory" if i in memory else "" if i not in norms else "norm_before" if i in h else "norm_behind"
            inside = one.section.rpartition(".")[2].isdigit() or kind == "memory"
            note = texts()[kind]["note"] if kind and inside else one.note
            done.append(replace(one, formula=one.formula.format_map(words), note=note))
        return done

    def note(self, role: str, values: Tensor, letters: str, **details: Any) -> int:
        """Add a step and return its index; `letters` are the symbols of its dimensions, separated by blanks."""
        said, names = texts()[role], tuple(letters.split())
        self.sizes.update({name: n for name, n in zip(names, values.shape, strict=True) if not name.isdigit()})
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values
        self._steps.append(WalkthroughStep(role=role, symbols=names, values=values, **{**said, **details}))
        return len(self._steps) - 1

    def walk(self, visit: ModuleCall) -> None:
        """Add all steps of one call of the model."""
        self._last = visit.gave
        self._follow(visit, visit.path, len(self._steps) - 1 if self._steps else None)

    # -- modules ------------------------------------------------------------------------------------------------------

    def _follow(self, visit: ModuleCall, section: str, source: int | None) -> int:
        """Add the steps of a stack or block and return the index of its output."""
        computed: NamedTensors = [] if source is None or not visit.given else [(visit.given[0], source)]
        for part in visit.parts:
            quiet = part.gave is not None and part.given and not part.parts and same(part.given[0], part.gave)
            if part.gave is None or quiet:  # dropout in evaluation mode and `nn.Identity` return their input
                continue
            streams = part.given and part.given[0].is_floating_point() and part.given[0].dim() in (2, 3)
            source = self._arrive(part.given[0], computed, visit, section) if streams else None
            if part.path in self._trace.paths:
                number = self._attention(part, source, section)
            elif any(inner.path in self._trace.paths for inner in part.all):
                number = self._follow(part, part.path, source)
            else:
                number = self._unit(part, part.gave, source, section)
            computed.append((part.gave, number))
        number = len(self._steps) - 1
        if visit.gave is not None and computed:
            number = self._arrive(visit.gave, computed, visit, section)
            self._ends.append((visit.gave, number))
        return number

    def _unit(self, part: ModuleCall, x: Tensor, source: int | None, section: str) -> int:
        """Add a module without attention: one step, or two for an embedding of ids and for a feed-forward network."""
        module, line = part.module, self._line(part.path)
        common: dict[str, Any] = {
            "module": part.path,
            "section": section,
            "sources": () if source is None else (source,),
        }
        matrices = [one for one in part.all if _is_matrix(one.module)]
        if not part.given:
            names = {"rows": tuple(line.tokens), "columns": tuple(line.tokens)}
            return self.note("bias", _first_sequence(x), f"H {line.letter} {line.letter}", **names, **common)
        if isinstance(module, nn.Embedding):
            common["sources"] = (self._ids(part, line, section),)
            scale = "" if float(getattr(module, "scale", 1.0)) == 1 else " · √M"
            return self._vectors("embedding", x, line, formula=f"x = E[ids]{scale}", **common)
        if part.given[0].dim() == 4:
            common["sources"] = tuple(range(len(self._steps)))[-1:]
            return self._vectors("patches", x, line, **common)
        if "norm" in type(module).__name__.lower():
            return self._vectors("norm", x, line, formula=f"{{h}} = {_norm(module)}", **common)
        if "position" in part.name:
            return self._vectors("position", x, line, **_places(part, x), **common)
        if len(matrices) > 1:
            return self._feed_forward(part, x, matrices, common)
        if self._last is not None and same(x, self._last):
            return self._vectors("logits", x, line, "V", formula=f"logits = {{h}} W{_bias(module)}", **common)
        return self._vectors("linear" if matrices else "between", x, line, **common)

    def _ids(self, part: ModuleCall, line: TokenAxis, section: str) -> int:
        """Add the ids of an embedding: those of a text, or those generated so far."""
        writes = line.letter == "T" and len(self._lines) > 1
        more = not writes and line.given < len(line.tokens)
        note = f"The first {line.given} are the input; the model generated the others one at a time."
        common = {"module": part.path, "section": section, "rows": tuple(line.tokens), "note": note if more else ""}
        return self.note("start" if writes else "tokens", part.given[0][0], line.letter, **common)

    def _vectors(self, role: str, x: Tensor, line: TokenAxis, last: str = "M", **details: Any) -> int:
        """Add vectors: one row per token, or one row if the tokens were pooled."""
        x = x[0]
        last = "F" if last == "M" and self.sizes.get("M", x.shape[-1]) != x.shape[-1] else last
        if x.dim() == 1:
            return self.note(role, x, last, **details)
        letter = line.letter if len(x) == len(line.tokens) else "N"  # patches do not have [CLS] yet
        return self.note(role, x, f"{letter} {last}", rows=tuple(line.tokens[-len(x) :]), **details)

    def _feed_forward(self, part: ModuleCall, x: Tensor, matrices: list[ModuleCall], common: dict[str, Any]) -> int:
        hidden, down, line = matrices[-1].given[0], matrices[-1], self._line(part.path)
        if hidden.shape[:-1] != x.shape[:-1]:  # experts, each with its routed tokens
            common |= {"branch": "feed-forward", "formula": "feed_forward({h}) = Σ share · expert({h})"}
            return self._vectors("feed_forward", x, line, **common)
        activation = type(getattr(part.module, "activation", None)).__name__.replace("NoneType", "activation")
        inside = f"{activation}({{h}} W₁{_bias(matrices[0].module, '₁')})"
        inside = "activation({h} W_gate) · ({h} W₁)" if len(matrices) > 2 else inside
        common |= {"branch": "feed-forward"}
        note = f"{activation}; {float((hidden > 0).float().mean()):.0%} of the hidden features are positive."
        wide = self._vectors("hidden", hidden, line, "F", formula=f"hidden = {inside}", note=note, **common)
        common |= {"module": down.path, "sources": (*common["sources"], wide)}
        formula = f"feed_forward({{h}}) = hidden W₂{_bias(down.module, '₂')}"
        return self._vectors("feed_forward", x, line, formula=formula, **common)

    # -- inside an attention layer ------------------------------------------------------------------------------------

    def _attention(self, part: ModuleCall, source: int | None, section: str) -> int:
        call, path, line = self._trace.attention_inputs(part.path), part.path, self._line(part.path)
        memories = [x for x in part.given[1:2] if not same(x, part.given[0])]
        keys = next((one for one in self._lines.values() if one.letter == "S"), line) if memories else line
        heads, rows = (list(range(n)) for n in call.q.shape[-3:-1])
        scores, allowed = recompute_scores(call, heads, rows, torch.promote_types(call.q.dtype, torch.float32))
        visible = scores.new_ones(1, call.T, call.S, dtype=torch.bool) if allowed is None else allowed
        visible = _first_sequence(visible.expand(*visible.shape[:-2], call.T, call.S))
        kind = "cross-attention" if memories else "self-attention" if visible.all() else "masked self-attention"
        T, S = line.letter, keys.letter
        common: dict[str, Any] = {"module": path, "section": section, "branch": kind, "rows": tuple(line.tokens)}
        # The keys of cross-attention come from the output of a stack.
        memory = next((i for tensor, i in reversed(self._ends) for x in memories if same(tensor, x)), source)
        projections = self._projections(part, call, ((line, source), (keys, memory)), common)
        common["columns"] = tuple(keys.tokens)
        product = "q kᵀ / √D" if isinstance(call.scores, ScaledDot) else f"{call.scores}(q, k)"
        biases = [i for i, one in enumerate(self._steps) if one.role == "bias" and call.bias is not None][-1:]
        formula = f"scores = {product}{'' if call.bias is None else ' + bias'}"
        first = self.note(
            "scores",
            _first_sequence(scores),
            f"H {T} {S}",
            sources=(*projections[:2], *biases),
            formula=formula,
            **common,
        )
        own = "1" if len(visible) == 1 else "H"
        at = self.note(
            "mask", visible, f"{own} {T} {S}", sources=(first,), **_mask_texts(call, visible, kind), **common
        )
        at = self.note("weights", _first_sequence(self._trace.weights(path)), f"H {T} {S}", sources=(at,), **common)
        del common["columns"]
        at = self.note(
            "heads", _first_sequence(self._trace.heads(path)), f"H {T} D", sources=(at, projections[2]), **common
        )
        out = next((one for one in reversed(part.parts) if _is_matrix(one.module)), part)
        del common["rows"]
        common |= {"module": out.path, "sources": (at,) if source is None else (source, at)}
        read = "{h}, memory" if memories else "{h}"
        formula = f"attention({read}) = concat(head₁, …, head_H) W_O{_bias(out.module, '_O')}"
        assert part.gave is not None
        return self._vectors("out", part.gave, line, formula=formula, **common)

    def _projections(
        self,
        part: ModuleCall,
        call: AttentionInputs,
        read: Sequence[tuple[TokenAxis, int | None]],
        common: dict[str, Any],
    ) -> list[int]:
        """Add queries, keys and values, from their projections if these are modules."""
        cross, projections = common["branch"] == "cross-attention", []
        for role, x in {"q": call.q, "k": call.k, "v": call.v}.items():
            line, source = read[role != "q"]
            product = next((one for one in part.parts if one.name == f"{role}_proj"), part)
            details: dict[str, Any] = {"explanation": texts()[f"{role}_cross" if cross else role]["explanation"]}
            bias = "" if product is part else _bias(product.module, f"_{role.upper()}")
            formula = texts()[role]["formula"] + bias
            details["formula"] = formula.replace("{h}", "memory") if cross and role != "q" else formula
            details |= {
                "module": product.path,
                "rows": tuple(line.tokens),
                "sources": () if source is None else (source,),
            }
            letters = f"{'H' if role == 'q' or call.groups == 1 else 'K'} {line.letter} D"
            projections.append(
                self.note(
                    role, _first_sequence(x), letters, note=_rotary_note(x, product, part.module), **common | details
                )
            )
        return projections

    # -- between modules ----------------------------------------------------------------------------------------------

    def _arrive(self, x: Tensor, computed: NamedTensors, visit: ModuleCall, section: str) -> int:
        """Return the step with these values, or a new one that explains them."""
        for tensor, number in reversed(computed):
            if same(tensor, x):
                return number
        computed.append(
            (x, self._between(x, computed, self._line(visit.path), {"module": visit.path, "section": section}))
        )
        return computed[-1][1]

    def _between(self, x: Tensor, computed: NamedTensors, line: TokenAxis, common: dict[str, Any]) -> int:
        alike = [(tensor, number) for tensor, number in computed if tensor.shape == x.shape][-6:]
        for some in itertools.chain(itertools.combinations(alike, 2), itertools.permutations(alike, 3)):
            if same(sum(tensor for tensor, _ in some), x):  # type: ignore[arg-type]  # in some order, to the bit
                return self._vectors("add", x, line, sources=tuple(sorted(number for _, number in some)), **common)
        for before, number in reversed(computed):
            own = common | {"sources": (number,)}
            if before.dim() == 3 and x.dim() == 3 and same(x[:, -before.shape[1] :], before):
                return self._vectors("front", x, line, **own)
            if before.dim() == 3 and _equal(before.mean(1), x):
                return self._vectors("pool", x, line, formula=f"x = mean over {line.letter} of x", **own)
            if before.dim() == 3 and _equal(before[:, 0], x):
                return self._vectors("pool", x, line, formula="x = the first token's x", **own)
            for weight in self._trace.module("").parameters():
                if weight.shape == (x.shape[-1], before.shape[-1]) and _equal(F.linear(before, weight.detach()), x):
                    return self._vectors("logits", x, line, "V", formula="logits = {h} Eᵀ", **own)
        change = x - computed[-1][0] if alike else x
        constant = alike and _equal(change, change[:, :1].expand_as(change), float(x.abs().max()))
        note = "The same vector was added to every token." if constant else ""
        return self._vectors("between", x, line, sources=tuple(i for _, i in computed[-1:]), note=note, **common)

    def _line(self, path: str) -> TokenAxis:
        return next(line for start, line in self._lines.items() if path.startswith(start))


def _is_matrix(module: nn.Module) -> bool:
    """Return whether a module is a linear map: torch's, or another with one matrix that is not an embedding table."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def _first_sequence(x: Tensor) -> Tensor:
    """Return the heads (H, …, …) of the first sequence of a batch; one if all are equal."""
    return x.reshape(-1, *x.shape[-3:])[0] if x.dim() > 2 else x[None]


def _equal(a: Tensor, b: Tensor, largest: float = 0.0) -> bool:
    """Return whether tensors are equal up to two units of rounding of the largest value."""
    if a.shape != b.shape or not a.numel():
        return False
    unit = torch.finfo(b.dtype).eps
    return float((a.double() - b.double()).abs().max()) <= 2 * unit * max(largest, float(b.abs().max()))


def _bias(module: nn.Module, mark: str = "") -> str:
    return "" if getattr(module, "bias", None) is None else f" + b{mark}"


def _norm(module: nn.Module) -> str:
    rms = "rms" in type(module).__name__.lower()
    ratio = "x / √(mean(x²) + ε)" if rms else "(x − mean(x)) / √(var(x) + ε)"
    return f"{ratio} · γ" + ("" if getattr(module, "bias", None) is None else " + β")


def _places(part: ModuleCall, x: Tensor) -> dict[str, str]:
    """Return the text for the kind and size of added positions."""
    kind = type(getattr(part.module, "choice", part.module)).__name__
    added = (x - part.given[0])[0, -1].float()
    start = ", ".join(f"{value:.3f}" for value in added[:4].tolist())
    note = f"{kind}: added to the last token was P = [{start}, …], with norm {float(added.norm()):.3g}."
    return {**texts().get(f"position_{kind.lower()}", {}), "note": note}


def _rotary_note(x: Tensor, product: ModuleCall, layer: nn.Module) -> str:
    """Return a note if queries or keys differ from their projection: rotated by position, or normalized."""
    y = product.gave
    if y is None or y.numel() != x.numel() or product.module is layer:
        return ""
    if same(y.unflatten(-1, (x.shape[-3], x.shape[-1])).transpose(-2, -3), x):
        return ""
    rotary, normed = getattr(layer, "rotary", None), getattr(layer, "q_norm", None) is not None
    if rotary is None:
        return "Normalized per head." if normed else "Changed after the projection."
    begin = "Normalized per head, then rotated" if normed else "Rotated"
    return f"{begin} by an angle proportional to the position ({rotary}), so that q · k depends on relative positions."


def _mask_texts(call: AttentionInputs, visible: Tensor, kind: str) -> dict[str, str]:
    """Return explanation and note of a mask."""
    T, S = visible.shape[-2:]
    allowed = int(visible[0].sum())
    causal = kind == "masked self-attention" and T == S and bool((visible == torch.ones_like(visible).tril()).all())
    role = "cross" if kind == "cross-attention" else "full" if allowed == T * S else "causal" if causal else "other"
    note = f"{'full()' if call.mask is None else call.mask}: {allowed:,} of {T * S:,} pairs may attend."
    return {"explanation": texts()[f"mask_{role}"]["explanation"], "note": note}
