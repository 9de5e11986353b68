"""Build the steps of a walkthrough from the module calls of a run.

Values and order are those of the run; no model is special-cased.

A step is the output of a module, an operation inside an attention layer (recomputed from its inputs), or an operation
that the model's code performs between its modules. The latter are identified by their values: if the input of a module
is bit-identical to the sum of two earlier results, these were added. Pre-norm, post-norm and parallel blocks are
therefore recognized without configuration.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.call_types import Kwargs
from clearhead.analysis.tracing.recompute import recompute_scores
from clearhead.analysis.tracing.trace import Trace
from clearhead.analysis.walkthrough.recorded_calls import ModuleCall, same
from clearhead.analysis.walkthrough.steps import WalkthroughStep, texts
from clearhead.attention import ScaledDot
from clearhead.attention.inputs import AttentionInputs

IndexedTensors = list[tuple[Tensor, int]]
"""Tensors computed so far in one module, with the indices of their steps."""


class TokenAxis(NamedTuple):
    """An axis of tokens: symbol of its length, labels, and number of input tokens (the rest was generated)."""

    symbol: str
    tokens: Sequence[str]
    n_inputs: int


class WalkthroughBuilder:
    """Builds the steps from the calls of a traced run.

    `axes` maps prefixes of module paths to token axes, of which the first match is used: {"encoder": …, "": …}.
    """

    def __init__(self, trace: Trace, lines: Mapping[str, TokenAxis]) -> None:
        self._trace = trace
        self._axes = lines
        self._steps: list[WalkthroughStep] = []
        self._stack_outputs: IndexedTensors = []  # outputs of stacks and blocks; a memory is one of these
        self._model_output: Tensor | None = None  # output of the model itself
        self.sizes: dict[str, int] = {}

    @property
    def steps(self) -> list[WalkthroughStep]:
        """All steps. In formulas, a vector is h after a norm and x in the stream.

        A norm is in the stream if its result is added to or leaves a block, which is known only after all steps.
        """
        stream = {step.sources[0] for step in self._steps if step.role == "add"} | {i for _, i in self._stack_outputs}
        norms = {i for i, step in enumerate(self._steps) if step.role == "norm"}
        h = norms - stream
        memory = {step.sources[0] for step in self._steps if (step.branch, step.role) == ("cross-attention", "k")}
        steps: list[WalkthroughStep] = []
        for i, step in enumerate(self._steps):
            source_index = i if step.role == "norm" else next(iter(step.sources), None)
            added = [steps[j].formula.partition(" = ")[0] for j in step.sources[1:]]  # attention(h), feed_forward(h)
            placeholders = {"h": "h" if source_index in h else "x", "added": " + ".join(added)}
            kind = "memory" if i in memory else "" if i not in norms else "norm_before" if i in h else "norm_behind"
            in_block = step.section.rpartition(".")[2].isdigit() or kind == "memory"
            note = texts()[kind]["note"] if kind and in_block else step.note
            steps.append(replace(step, formula=step.formula.format_map(placeholders), note=note))
        return steps

    def add_step(self, role: str, values: Tensor, symbols: str, **details: Any) -> int:
        """Add a step and return its index; `symbols` are the symbols of its dimensions, separated by blanks."""
        role_texts = texts()[role]
        names = tuple(symbols.split())
        self.sizes.update({name: n for name, n in zip(names, values.shape, strict=True) if not name.isdigit()})
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values
        self._steps.append(WalkthroughStep(role=role, symbols=names, values=values, **{**role_texts, **details}))
        return len(self._steps) - 1

    def add_call(self, call: ModuleCall) -> None:
        """Add all steps of one call of the model."""
        self._model_output = call.output
        self._add_stack(call, call.path, len(self._steps) - 1 if self._steps else None)

    # -- modules ------------------------------------------------------------------------------------------------------

    def _add_stack(self, call: ModuleCall, section: str, source: int | None) -> int:
        """Add the steps of a stack or block and return the index of its output."""
        computed: IndexedTensors = [] if source is None or not call.inputs else [(call.inputs[0], source)]
        for child in call.children:
            is_identity = (
                child.output is not None and child.inputs and not child.children and same(child.inputs[0], child.output)
            )
            if child.output is None or is_identity:  # dropout in evaluation mode and `nn.Identity` return their input
                continue
            has_stream = child.inputs and child.inputs[0].is_floating_point() and child.inputs[0].dim() in (2, 3)
            source = self._find_or_explain(child.inputs[0], computed, call, section) if has_stream else None
            if child.path in self._trace.paths:
                number = self._add_attention(child, source, section)
            elif any(inner.path in self._trace.paths for inner in child.all):
                number = self._add_stack(child, child.path, source)
            else:
                number = self._add_module(child, child.output, source, section)
            computed.append((child.output, number))
        number = len(self._steps) - 1
        if call.output is not None and computed:
            number = self._find_or_explain(call.output, computed, call, section)
            self._stack_outputs.append((call.output, number))
        return number

    def _add_module(self, call: ModuleCall, x: Tensor, source: int | None, section: str) -> int:
        """Add a module without attention: one step, or two for an embedding of ids and for a feed-forward network."""
        module = call.module
        axis = self._axis(call.path)
        common: Kwargs = {
            "module": call.path,
            "section": section,
            "sources": () if source is None else (source,),
        }
        matrices = [child for child in call.all if _is_matrix(child.module)]
        if not call.inputs:
            names = {"rows": tuple(axis.tokens), "columns": tuple(axis.tokens)}
            return self.add_step("bias", _first_sequence(x), f"H {axis.symbol} {axis.symbol}", **names, **common)
        if isinstance(module, nn.Embedding):
            common["sources"] = (self._add_ids(call, axis, section),)
            scale = "" if float(getattr(module, "scale", 1.0)) == 1 else " · √M"
            return self._add_vectors("embedding", x, axis, formula=f"x = E[ids]{scale}", **common)
        if call.inputs[0].dim() == 4:
            common["sources"] = tuple(range(len(self._steps)))[-1:]
            return self._add_vectors("patches", x, axis, **common)
        if "norm" in type(module).__name__.lower():
            return self._add_vectors("norm", x, axis, formula=f"{{h}} = {_norm(module)}", **common)
        if "position" in call.name:
            return self._add_vectors("position", x, axis, **_position_texts(call, x), **common)
        if len(matrices) > 1:
            return self._add_feed_forward(call, x, matrices, common)
        if self._model_output is not None and same(x, self._model_output):
            return self._add_vectors("logits", x, axis, "V", formula=f"logits = {{h}} W{_bias(module)}", **common)
        return self._add_vectors("linear" if matrices else "between", x, axis, **common)

    def _add_ids(self, call: ModuleCall, axis: TokenAxis, section: str) -> int:
        """Add the ids of an embedding: those of a text, or those generated so far."""
        is_target = axis.symbol == "T" and len(self._axes) > 1
        has_generated = not is_target and axis.n_inputs < len(axis.tokens)
        note = f"The first {axis.n_inputs} are the input; the model generated the remaining ones one at a time."
        common = {
            "module": call.path,
            "section": section,
            "rows": tuple(axis.tokens),
            "note": note if has_generated else "",
        }
        return self.add_step("start" if is_target else "tokens", call.inputs[0][0], axis.symbol, **common)

    def _add_vectors(self, role: str, x: Tensor, axis: TokenAxis, last: str = "M", **details: object) -> int:
        """Add vectors: one row per token, or one row if the tokens were pooled."""
        x = x[0]
        last = "F" if last == "M" and self.sizes.get("M", x.shape[-1]) != x.shape[-1] else last
        if x.dim() == 1:
            return self.add_step(role, x, last, **details)
        symbol = axis.symbol if len(x) == len(axis.tokens) else "N"  # patches do not have [CLS] yet
        return self.add_step(role, x, f"{symbol} {last}", rows=tuple(axis.tokens[-len(x) :]), **details)

    def _add_feed_forward(self, call: ModuleCall, x: Tensor, matrices: list[ModuleCall], common: Kwargs) -> int:
        hidden = matrices[-1].inputs[0]
        down = matrices[-1]
        axis = self._axis(call.path)
        if hidden.shape[:-1] != x.shape[:-1]:  # experts, each with its routed tokens
            common |= {"branch": "feed-forward", "formula": "feed_forward({h}) = Σ share · expert({h})"}
            return self._add_vectors("feed_forward", x, axis, **common)
        activation = type(getattr(call.module, "activation", None)).__name__.replace("NoneType", "activation")
        hidden_formula = f"{activation}({{h}} W₁{_bias(matrices[0].module, '₁')})"
        hidden_formula = "activation({h} W_gate) · ({h} W₁)" if len(matrices) > 2 else hidden_formula
        common |= {"branch": "feed-forward"}
        note = f"{activation}; {float((hidden > 0).float().mean()):.0%} of the hidden features are positive."
        hidden_step = self._add_vectors(
            "hidden", hidden, axis, "F", formula=f"hidden = {hidden_formula}", note=note, **common
        )
        common |= {"module": down.path, "sources": (*common["sources"], hidden_step)}
        formula = f"feed_forward({{h}}) = hidden W₂{_bias(down.module, '₂')}"
        return self._add_vectors("feed_forward", x, axis, formula=formula, **common)

    # -- inside an attention layer ------------------------------------------------------------------------------------

    def _add_attention(self, call: ModuleCall, source: int | None, section: str) -> int:
        attention_inputs = self._trace.attention_inputs(call.path)
        path = call.path
        axis = self._axis(call.path)
        memories = [x for x in call.inputs[1:2] if not same(x, call.inputs[0])]
        keys = (
            next((candidate for candidate in self._axes.values() if candidate.symbol == "S"), axis)
            if memories
            else axis
        )
        heads, rows = (list(range(n)) for n in attention_inputs.q.shape[-3:-1])
        scores, allowed = recompute_scores(
            attention_inputs, heads, rows, torch.promote_types(attention_inputs.q.dtype, torch.float32)
        )
        visible = (
            scores.new_ones(1, attention_inputs.T, attention_inputs.S, dtype=torch.bool) if allowed is None else allowed
        )
        visible = _first_sequence(visible.expand(*visible.shape[:-2], attention_inputs.T, attention_inputs.S))
        kind = "cross-attention" if memories else "self-attention" if visible.all() else "masked self-attention"
        T, S = axis.symbol, keys.symbol
        common: Kwargs = {"module": path, "section": section, "branch": kind, "rows": tuple(axis.tokens)}
        # The keys of cross-attention come from the output of a stack.
        memory = next((i for tensor, i in reversed(self._stack_outputs) for x in memories if same(tensor, x)), source)
        projections = self._add_projections(call, attention_inputs, ((axis, source), (keys, memory)), common)
        common["columns"] = tuple(keys.tokens)
        product = "q kᵀ / √D" if isinstance(attention_inputs.scores, ScaledDot) else f"{attention_inputs.scores}(q, k)"
        has_bias = bool(attention_inputs.biases)
        biases = [i for i, step in enumerate(self._steps) if step.role == "bias" and has_bias][-1:]
        formula = f"scores = {product}{' + bias' if has_bias else ''}"
        scores_step = self.add_step(
            "scores",
            _first_sequence(scores),
            f"H {T} {S}",
            sources=(*projections[:2], *biases),
            formula=formula,
            **common,
        )
        mask_heads = "1" if len(visible) == 1 else "H"
        previous = self.add_step(
            "mask",
            visible,
            f"{mask_heads} {T} {S}",
            sources=(scores_step,),
            **_mask_texts(attention_inputs, visible, kind),
            **common,
        )
        previous = self.add_step(
            "weights", _first_sequence(self._trace.weights(path)), f"H {T} {S}", sources=(previous,), **common
        )
        del common["columns"]
        previous = self.add_step(
            "heads", _first_sequence(self._trace.heads(path)), f"H {T} D", sources=(previous, projections[2]), **common
        )
        out = next((child for child in reversed(call.children) if _is_matrix(child.module)), call)
        del common["rows"]
        common |= {"module": out.path, "sources": (previous,) if source is None else (source, previous)}
        input_names = "{h}, memory" if memories else "{h}"
        formula = f"attention({input_names}) = concat(head₁, …, head_H) W_O{_bias(out.module, '_O')}"
        assert call.output is not None
        return self._add_vectors("out", call.output, axis, formula=formula, **common)

    def _add_projections(
        self,
        call: ModuleCall,
        attention_inputs: AttentionInputs,
        sources_by_role: Sequence[tuple[TokenAxis, int | None]],
        common: Kwargs,
    ) -> list[int]:
        """Add queries, keys and values, from their projections if these are modules."""
        cross = common["branch"] == "cross-attention"
        projections = []
        for role, x in {"q": attention_inputs.q, "k": attention_inputs.k, "v": attention_inputs.v}.items():
            axis, source = sources_by_role[role != "q"]
            product = next((child for child in call.children if child.name == f"{role}_proj"), call)
            details: Kwargs = {"explanation": texts()[f"{role}_cross" if cross else role]["explanation"]}
            bias = "" if product is call else _bias(product.module, f"_{role.upper()}")
            formula = texts()[role]["formula"] + bias
            details["formula"] = formula.replace("{h}", "memory") if cross and role != "q" else formula
            details |= {
                "module": product.path,
                "rows": tuple(axis.tokens),
                "sources": () if source is None else (source,),
            }
            symbols = f"{'H' if role == 'q' or attention_inputs.groups == 1 else 'K'} {axis.symbol} D"
            projections.append(
                self.add_step(
                    role, _first_sequence(x), symbols, note=_rotary_note(x, product, call.module), **common | details
                )
            )
        return projections

    # -- between modules ----------------------------------------------------------------------------------------------

    def _find_or_explain(self, x: Tensor, computed: IndexedTensors, call: ModuleCall, section: str) -> int:
        """Return the step with these values, or a new one that explains them."""
        for tensor, number in reversed(computed):
            if same(tensor, x):
                return number
        computed.append(
            (x, self._explain_operation(x, computed, self._axis(call.path), {"module": call.path, "section": section}))
        )
        return computed[-1][1]

    def _explain_operation(self, x: Tensor, computed: IndexedTensors, axis: TokenAxis, common: Kwargs) -> int:
        alike = [(tensor, number) for tensor, number in computed if tensor.shape == x.shape][-6:]
        for summands in itertools.chain(itertools.combinations(alike, 2), itertools.permutations(alike, 3)):
            if same(sum(tensor for tensor, _ in summands), x):  # type: ignore[arg-type]  # in some order, to the bit
                return self._add_vectors(
                    "add", x, axis, sources=tuple(sorted(number for _, number in summands)), **common
                )
        for before, number in reversed(computed):
            step_options = common | {"sources": (number,)}
            if before.dim() == 3 and x.dim() == 3 and same(x[:, -before.shape[1] :], before):
                return self._add_vectors("front", x, axis, **step_options)
            if before.dim() == 3 and _equal(before.mean(1), x):
                return self._add_vectors("pool", x, axis, formula=f"x = mean over {axis.symbol} of x", **step_options)
            if before.dim() == 3 and _equal(before[:, 0], x):
                return self._add_vectors("pool", x, axis, formula="x = the first token's x", **step_options)
            for weight in self._trace.module("").parameters():
                if weight.shape == (x.shape[-1], before.shape[-1]) and _equal(F.linear(before, weight.detach()), x):
                    return self._add_vectors("logits", x, axis, "V", formula="logits = {h} Eᵀ", **step_options)
        change = x - computed[-1][0] if alike else x
        constant = alike and _equal(change, change[:, :1].expand_as(change), float(x.abs().max()))
        note = "The same vector was added to every token." if constant else ""
        return self._add_vectors("between", x, axis, sources=tuple(i for _, i in computed[-1:]), note=note, **common)

    def _axis(self, path: str) -> TokenAxis:
        return next(axis for start, axis in self._axes.items() if path.startswith(start))


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


def _position_texts(call: ModuleCall, x: Tensor) -> dict[str, str]:
    """Return the text for the kind and size of added positions."""
    kind = type(getattr(call.module, "choice", call.module)).__name__
    position_vector = (x - call.inputs[0])[0, -1].float()
    first_values = ", ".join(f"{value:.3f}" for value in position_vector[:4].tolist())
    note = (
        f"{kind}: added to the last token was P = [{first_values}, …], with norm {float(position_vector.norm()):.3g}."
    )
    return {**texts().get(f"position_{kind.lower()}", {}), "note": note}


def _rotary_note(x: Tensor, product: ModuleCall, layer: nn.Module) -> str:
    """Return a note if queries or keys differ from their projection: rotated by position, or normalized."""
    y = product.output
    if y is None or y.numel() != x.numel() or product.module is layer:
        return ""
    if same(y.unflatten(-1, (x.shape[-3], x.shape[-1])).transpose(-2, -3), x):
        return ""
    rotary = getattr(layer, "rotary", None)
    normed = getattr(layer, "q_norm", None) is not None
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
