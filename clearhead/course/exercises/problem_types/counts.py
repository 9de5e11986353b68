"""Counting problems: allowed pairs of a mask, cost of an attention layer, receptive field of layers of heads."""

from __future__ import annotations

import re

import sympy

from clearhead import masks
from clearhead.course.exercises.numbers import N, Number
from clearhead.course.exercises.problem_types.models import line_counts, meta_layer
from clearhead.course.exercises.random_values import RandomValues
from clearhead.course.exercises.sheet import ExactGrid, WorksheetBuilder
from clearhead.course.exercises.source import MAX_SIDE, KeyPath, ProblemSource, ProblemValues
from clearhead.errors import ClearheadError

_MAX_GRAPH_NODES = 20_000


def mask(source: ProblemSource, sheet: WorksheetBuilder) -> None:
    """Add the 0/1 matrix of a mask, its number of allowed pairs, and its sparsity."""
    n = source.integer("length", most=MAX_SIDE)
    source.require_keys("expression")
    pattern = _parse_mask(source, "expression", source.text("expression"))
    names = [f"{i}" for i in range(n)]
    sheet.texts["pattern"] = pattern_in_words(source.text("expression"))
    sheet.add_given({"mask": str(pattern), "n": sympy.Integer(n)})
    grid = ExactGrid.of([[sympy.Integer(int(may)) for may in row] for row in pattern.dense(n).tolist()], names, names)
    formula = "row i, column j: may query i attend to key j?", r"M_{ij} = 1 \text{ where } i \text{ may attend to } j"
    cells = sheet.add("mask", "The mask (1: may attend; positions count from 0)", grid, "M", *formula)
    grid = ExactGrid.of([[sympy.Add(*row) for row in cells]], [""], names)
    [keys_per_query] = sheet.add("keys", "Keys of each query", grid, "k", "sums of the rows", r"k_i = \sum_j M_{ij}")
    grid = ExactGrid.scalar(sympy.Add(*keys_per_query))
    [[total]] = sheet.add("allowed", "Pairs allowed", grid, "A", "sum of all cells", r"A = \sum_i k_i")
    grid = ExactGrid.scalar(total / sympy.Integer(n * n))
    [[density]] = sheet.add("density", "Density", grid, "A/n²", "pairs allowed / n²", r"A / n^2")
    grid = ExactGrid.scalar(1 - density)
    sheet.add("saving", "Saving against full attention", grid, "1 − A/n²", "1 − density", r"1 - A / n^2")
    expressions = source.names("also")
    if expressions:
        counts = [sympy.Integer(_parse_mask(source, ("also", i), text).count(n)) for i, text in enumerate(expressions)]
        names = [reading_in_words(text) for text in expressions]
        grid = ExactGrid.of([[count, 1 - count / (n * n)] for count in counts], names, ["pairs", "saving"])
        sheet.add("also", "Other readings of the question", grid, "", "the same count", r"A, \quad 1 - A / n^2")
    sheet.check("the closed-form count of masks", ([[total]], [[pattern.count(n)]]))


_CALL = re.compile(r"(window|every|dilated)\((\d+)(?:, (?:start=)?(\d+))?\)")


def pattern_in_words(expression: str) -> str:
    """Return a sentence for a mask that is an OR of windows and strides; other masks are quoted."""
    calls = [_CALL.fullmatch(part.strip()) for part in expression.split("|")]
    parts = ["itself"]
    for call in calls:
        if call is None:
            return f"Each token attends as the mask {expression} allows."
        name = call[1]
        first = call[2]
        second = call[3] or "0"
        if name == "window":
            parts.append(f"the {first} tokens before it and the {second} after it")
        elif name == "dilated":
            parts.append(f"all tokens at a distance that is a multiple of {first}")
        else:
            start = "" if second == "0" else f"{second} plus "
            parts.append(f"all tokens whose number is {start}a multiple of {first}")
    return f"Each token attends to {', to '.join(parts[:-1])}, and to {parts[-1]}."


_STARTS = re.compile(r"every\((\d+), start=(\d+)\)")
_STRIDE = re.compile(r"(every|dilated)\((\d+)(?:, (?:start=)?(\d+))?\)(\.T)?")


def reading_in_words(expression: str) -> str:
    """Return a short name of a mask with a window and strides; other masks are quoted.

    Example:
        >>> reading_in_words("window(2, 2) | every(4, start=3)"), reading_in_words("window(2, 2) | dilated(4)")
        ('tokens 3, 7, 11, …', 'distances 0, 4, 8, …')
    """
    parts: list[str] = []
    for text in (part.strip() for part in expression.split("|")):
        call = _STRIDE.fullmatch(text)
        if call is None and not text.startswith("window("):
            return expression
        if call is not None and call[4]:
            parts.append("which attend to all" if parts else "tokens that attend to all")
        elif call is not None:
            step, start = int(call[2]), int(call[3] or 0)
            name = "tokens" if call[1] == "every" else "distances"
            parts.append(f"{name} {start}, {start + step}, {start + 2 * step}, …")
    return ", ".join(parts) or expression


def _parse_mask(source: ProblemSource, key: str | KeyPath, text: str) -> masks.Mask:
    try:
        pattern = masks.parse(text)
        pattern.check(1, 1, None)
        return pattern
    except ClearheadError as error:
        source.fail(key, f"the mask {text!r} does not parse: {str(error).splitlines()[0]}")


def vary_mask(source: ProblemSource, rng: RandomValues) -> dict[str, object]:
    """Return the same pattern with other numbers, consistently in all readings of the question."""

    def renumbered(text: str) -> str:
        drawn = re.sub(r"(?<!start=)\b\d+", lambda match: str(rng.similar(int(match[0]))), text)
        # A start keeps its distance from the step: "the fourth, eighth, …" becomes "the sixth, twelfth, …".
        distances = iter([int(step) - int(start) for step, start in _STARTS.findall(text)])
        return _STARTS.sub(lambda match: f"every({match[1]}, start={max(0, int(match[1]) - next(distances))})", drawn)

    n = source.integer("length", most=MAX_SIDE)
    also = {"also": [renumbered(text) for text in source.names("also")]} if "also" in source.values else {}
    length = rng.randint(max(4, n - 2), min(MAX_SIDE, n + 2))
    return {"expression": renumbered(source.text("expression")), "length": length} | also


def cost(source: ProblemSource, sheet: WorksheetBuilder) -> None:
    """Add parameters, stored values and operations of one attention layer, as formulas and in numbers.

    Only matrix products are counted; a multiplication and its addition count as two operations.
    """
    d = source.integer("d_model", most=10**6)
    h = source.integer("heads", 1, most=10**6)
    if d % h:
        source.fail("heads", f"d_model is {d} and there are {h} heads; the heads must share it evenly")
    bias, output = source.flag("bias", False), source.flag("output", True)
    size = source.integer("bytes", 4, most=16)
    n = sympy.Integer(source.integer("tokens")) if "tokens" in source.values else N
    parameters = {f"W_{name}": sympy.Integer(d * d) for name in ("QKVO" if output else "QKV")}
    if bias:
        parameters["biases"] = sympy.Integer(len(parameters) * d)
    stored = {"Q, K, V": 3 * n * d, "attention weights": h * n**2, "heads' outputs": n * d}
    operations = {f"projection {name}": 2 * n * d**2 for name in "QKV"}
    operations |= {"scores Q·Kᵀ": 2 * n**2 * d, "weighted sum P·V": 2 * n**2 * d}
    if output:
        operations["projection O"] = 2 * n * d**2

    def summed(key: str, title: str, parts: dict[str, Number], name: str, *formula: str) -> Number:
        """Add a column of numbers and return their sum."""
        column = sheet.add(key, title, ExactGrid.of([[x] for x in parts.values()], list(parts), [name]), "", *formula)
        return sympy.expand(sympy.Add(*[x for [x] in column]))

    sheet.add_given({"d": sympy.Integer(d), "h": sympy.Integer(h), "n": n})
    [[head]] = sheet.add(
        "d_head", "Width of a head", ExactGrid.scalar(sympy.Integer(d // h)), "D", "D = d / h", r"D = d / h"
    )
    title, formula = "Parameters of one head (Q, K and V)", ("3·d²/h", "3 d^2/h")
    sheet.add("per_head", title, ExactGrid.scalar(3 * d * head), "", *formula)
    weights = summed("parameters", "Parameters", parameters, "parameters", "d·d for each projection", "d^2")
    sheet.add("parameters_total", "Parameters in all", ExactGrid.scalar(weights), "", "their sum", r"\sum")
    formula = "3·n·d, h·n², n·d", r"3nd, \quad h n^2, \quad nd"
    stored_values = summed("stored", "Values stored for n tokens", stored, "values", *formula)
    sheet.add(
        "stored_total", "Values stored in all", ExactGrid.scalar(stored_values), "", "h·n² + 4·n·d", r"h n^2 + 4 n d"
    )
    title = f"Bytes of the attention weights, {size} each"
    formula = (f"{size}·h·n²", rf"{size} h n^2")
    sheet.add("weights_bytes", title, ExactGrid.scalar(size * h * n**2), "", *formula)
    formula = "2·n·d² for a projection, 2·n²·d for scores and for the sum", r"2 n d^2, \quad 2 n^2 d"
    n_operations = summed("operations", "Operations of a forward pass", operations, "operations", *formula)
    sheet.add("operations_total", "Operations in all", ExactGrid.scalar(n_operations), "", "their sum", r"\sum")
    length = int(n) if n.is_Integer else 13  # a formula is evaluated at one length
    layer = meta_layer(d, h, bias)
    parts = [layer.q_proj, layer.k_proj, layer.v_proj, *([layer.o_proj] if output else [])]
    count = sum(p.numel() for part in parts for p in part.parameters())
    flops = 2 * sum(line_counts(layer, length, length)[: 6 if output else 5])
    sheet.check("the parameters of MultiHeadAttention", ([[weights]], [[count]]))
    sheet.check("torch's count of the operations", ([[n_operations.subs(N, length)]], [[flops]]))
    sheet.remarks += [
        "Operations count a multiplication and its addition as two; count them as one and each number halves. "
        "Softmax and scaling add some n² per head and are left out.",
        "The number of heads changes neither the parameters nor the operations, only how many weights are stored."
        if h > 1
        else "The attention weights are not parameters: they are computed for each input.",
    ]


def vary_cost(source: ProblemSource, rng: RandomValues) -> ProblemValues:
    heads = rng.randint(2, 16) if source.integer("heads", 1) > 1 else 1
    variant = {"heads": heads, "d_model": heads * 8 * rng.randint(2, 16) * (1 if heads > 1 else 4)}
    variant |= {"bytes": rng.choice((2, 4, 8))} if heads > 1 else {}
    return variant | ({"tokens": 50 * rng.randint(2, 60)} if "tokens" in source.values else {})


def receptive_field(source: ProblemSource, sheet: WorksheetBuilder) -> None:
    """Add the number of inputs that one output can depend on, if each head attends to one position.

    With residual connections a node depends on itself and one further node per head, so n layers of k heads reach
    at most (k + 1)^n inputs, and never more than there are.
    """
    heads = source.integers("heads", 1000)
    layers = source.integer("layers", most=16)
    tokens = source.integer("tokens", 0, least=0)
    names = [f"{k} head{'' if k == 1 else 's'}" for k in heads]
    columns = [f"layer {n}" for n in range(1, layers + 1)]
    sizes = [[sympy.Integer((k + 1) ** n) for n in range(1, layers + 1)] for k in heads]
    formula = "r = (k + 1)^n", "r_n = (k + 1)^n"
    title = "Nodes of the layer below that a node depends on: itself and one node per head"
    grid = ExactGrid.of([[sympy.Integer(k + 1)] for k in heads], names, ["nodes"])
    sheet.add("branching", title, grid, "b", "b = k + 1", "b = k + 1")
    grid = ExactGrid.of([[sympy.Integer(k + 1) ** N] for k in heads], names, ["size"])
    sheet.add("formula", "Receptive field at layer n", grid, "r", *formula)
    sheet.add("sizes", "In numbers", ExactGrid.of(sizes, names, columns), "r", *formula)
    if tokens:
        capped = ExactGrid.of([[min(size, sympy.Integer(tokens)) for size in row] for row in sizes], names, columns)
        formula = "min((k + 1)^n, tokens)", r"\min\left((k + 1)^n, T\right)"
        sheet.add("capped", f"Among {tokens:,} tokens", capped, "r", *formula)
    sheet.remarks += [
        "This is an upper bound: heads that choose the same node, or nodes already reached, reach fewer.",
        "Without the residual connection a node would not depend on itself, and k heads would reach at most k^n.",
    ]
    cases = [
        (k, i, size)
        for k, row in zip(heads, sizes, strict=True)
        for i, size in enumerate(row)
        if size <= _MAX_GRAPH_NODES
    ]
    pairs = [([[size]], [[count_reachable(k, i + 1, int(size))]]) for k, i, size in cases]
    sheet.check("following an attention graph that reaches the bound", *pairs)


def count_reachable(heads: int, layers: int, length: int) -> int:
    """Return the number of inputs that reach one node if head h of layer l attends h·(k + 1)^(l − 1) positions ahead.

    Positions wrap around. No two paths meet until all positions are used.
    """
    reachable = {0}
    for layer in range(layers):
        reachable |= {(at + head * (heads + 1) ** layer) % length for at in reachable for head in range(1, heads + 1)}
    return len(reachable)


def vary_receptive_field(source: ProblemSource, rng: RandomValues) -> dict[str, object]:
    variant = {"heads": rng.sample(range(1, 13), min(len(source.vector("heads")), 12)), "layers": rng.randint(3, 6)}
    return variant | ({"tokens": 100 * rng.randint(2, 50)} if "tokens" in source.values else {})
