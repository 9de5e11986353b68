"""Proofs in letters: every step holds in numbers too, and a step that is changed slightly is rejected."""

from __future__ import annotations

import ast
import copy
import json
import re
import tomllib
from importlib import resources

import pytest
from markdown_it import MarkdownIt

from clearhead.config import toml_document
from clearhead.course import proofs
from clearhead.course.exercises import ProblemError
from clearhead.course.exercises.render.latex import math as to_typst
from clearhead.errors import ClearheadError
from tests.support.proof_numbers import Numbers

NAMES = list(proofs.bundled_proofs())
RELATIONS = {"equals": 0, "at_most": 1, "at_least": -1, "greater_than": -1}


def source(name):
    path = resources.files("clearhead.course.proofs") / "library" / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def chains(values):
    """Every chain of a proof: its part, the path of its steps, and the expression it starts from."""
    for part in values["part"]:
        if "induction" in part:
            claim, over = ast.parse(part["induction"]["claim"], mode="eval").body, part["induction"]["over"]
            for key, value in (("base", "0"), ("step", f"({over} + 1)")):
                left = ast.parse(ast.unparse(claim.left), mode="eval").body
                for node in ast.walk(left):
                    if isinstance(node, ast.Name) and node.id == over:
                        node.id = value
                yield part, ("induction", key), ast.parse(ast.unparse(left), mode="eval").body
        elif "start" in part:
            yield part, ("step",), ast.parse(part["start"], mode="eval").body


def steps_of(part, path):
    for key in path:
        part = part[key]
    return part


def in_numbers(numbers, values, part, tree):
    """The value of an expression at random indices; its free indices are fixed in `numbers`."""
    axes, at = numbers.evaluate(tree, numbers.free)
    return at(*[1 + i % size for i, size in enumerate(axes, 1)])


def holds(values, part, before, after, sign, seeds=(1, 2)):
    """Whether a step holds in numbers, for several random values; None if it cannot be evaluated."""
    for seed in seeds:
        numbers = Numbers(values, seed)
        numbers.free = {
            name: numbers.rng.randint(1, numbers.size(size)) for name, size in values.get("indices", {}).items()
        }
        for text in part.get("assume", []):
            assume(numbers, ast.parse(text, mode="eval").body)
        try:
            x, y = (in_numbers(numbers, values, part, tree) for tree in (before, after))
        except (ArithmeticError, ValueError, AssertionError, KeyError, AttributeError, IndexError, RecursionError):
            return None
        if isinstance(x, complex) or isinstance(y, complex):
            return None
        size = max(1.0, abs(x), abs(y))
        if (abs(x - y) if sign == 0 else sign * (x - y)) > 1e-6 * size:
            return False
    return True


def assume(numbers, equation):
    """Choose numbers for which an assumption holds."""
    left = ast.unparse(equation.left)
    if left == "delta(a, m)":
        numbers.free["m"] = 1 + numbers.free["a"] % numbers.size("n")
    elif left.startswith("sum(b, d, u[b]"):
        d = numbers.size("d")
        x = [numbers.entry("x", (i,)) for i in range(1, d + 1)]
        u = [x[1] - x[2], x[2] - x[0], x[0] - x[1]]  # orthogonal to (1, 1, 1) and to x
        numbers.entries |= {("u", (i + 1,)): u[i] for i in range(d)}


def lines(values):
    """Every step: its part, the path of its chain, its position, the expression before and after, and the relation."""
    for part, path, start in chains(values):
        before = start
        for position, step in enumerate(steps_of(part, path)):
            relation = next(key for key in RELATIONS if key in step)
            after = ast.parse(step[relation], mode="eval").body
            yield part, path, position, before, after, relation
            before = after


@pytest.mark.parametrize("name", NAMES)
def test_steps_hold_in_numbers(name):
    values = source(name)
    verdicts = [holds(values, part, a, b, RELATIONS[relation]) for part, _, _, a, b, relation in lines(values)]
    assert verdicts
    assert all(verdicts)


def mutations(tree):
    """Expressions that differ from this one in one place: a number, an operator, an index or a factor."""
    swaps = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
    nodes = list(ast.walk(tree))
    for position, node in enumerate(nodes):
        changed = copy.deepcopy(tree)
        twin = list(ast.walk(changed))[position]
        if isinstance(node, ast.Constant):
            twin.value = node.value + 1
        elif isinstance(node, ast.BinOp) and type(node.op) in swaps:
            twin.op = swaps[type(node.op)]()
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
            twin.slice.elts = node.slice.elts[::-1]
        elif isinstance(node, ast.Call) and node.func.id in ("exp", "sqrt", "sin", "cos"):
            twin.func.id = {"exp": "sqrt", "sqrt": "exp", "sin": "cos", "cos": "sin"}[node.func.id]
        else:
            continue
        yield ast.parse(ast.unparse(changed), mode="eval").body
    for change in ("99 * ({})", "({}) / 99", "({}) + 1"):
        yield ast.parse(change.format(ast.unparse(tree)), mode="eval").body


@pytest.mark.parametrize("name", NAMES)
def test_changed_step_is_rejected(name):
    """Each step is changed in every place; a change that makes it wrong in numbers is rejected, and there is one."""
    values = source(name)
    for part, path, position, before, after, relation in lines(values):
        rejected = 0
        for changed in mutations(after):
            if holds(values, part, before, changed, RELATIONS[relation]) is not False:
                continue
            short = copy.deepcopy(part)
            holder = steps_of(short, path[:-1])
            chain = holder[path[-1]][: position + 1]
            chain[-1] = {relation: ast.unparse(changed)} | {k: v for k, v in chain[-1].items() if k != relation}
            holder[path[-1]] = chain
            with pytest.raises(ProblemError):
                proofs.verify(toml_document(values | {"part": [short]}))
            rejected += 1
        assert rejected, f"no change of this step is tested: {ast.unparse(after)}"


def test_gap_that_may_be_negative_is_rejected():
    text = """
    title = "x"
    statement = "x"
    scalars = ["x"]
    [[part]]
    start = "x"
    [[part.step]]
    at_most = "2 * x"
    gap = "x"
    """
    with pytest.raises(ProblemError, match="line 8: this step does not hold: x ≤ 2 \\* x"):
        proofs.verify(text)
    proofs.verify(text.replace('scalars = ["x"]', 'scalars = ["x"]\npositive = ["x"]'))


@pytest.mark.parametrize("start", ["x**2", "sum(j, n, x**2)", "exp(x) - 1", "0 * x"])
def test_gap_that_may_be_zero_does_not_show_strict_inequality(start):
    text = f"""
    title = "x"
    statement = "x"
    sizes = ["n"]
    scalars = ["x"]
    [[part]]
    start = "{start}"
    [[part.step]]
    greater_than = "0"
    gap = "{start}"
    """
    with pytest.raises(ProblemError, match=r"this step does not hold: .* > 0"):
        proofs.verify(text)
    assert proofs.verify(text.replace(start, f"{start} + exp(x) + 1")).n_steps == 1


@pytest.mark.parametrize(
    ("start", "step"),
    [
        ("sum(j, n, x[j])", "sum(j, m, x[j])"),
        ("sum(j, n, x[j] * x[j])", "sum(j, n, x[j])**2"),
        ("x[i] * x[j]", "x[i] * x[i]"),
        ("sum(j, n, x[j])", "n * x[j]"),
        ("(A @ B)[i, j]", "(B @ A)[i, j]"),
        ("(A @ A.T)[i, j]", "(A.T @ A)[i, j]"),
        ("sum(j, n, exp(x[j]))", "exp(sum(j, n, x[j]))"),
        ("sum(j, n, x[sigma(j)] * x[j])", "sum(j, n, x[j] * x[j])"),
    ],
)
def test_wrong_equation_is_rejected(start, step):
    with pytest.raises(ProblemError):
        proofs.verify(_proof(start, step))


@pytest.mark.parametrize(
    ("start", "step"),
    [
        ("sum(i, n, sum(j, n, A[i, j] * x[j]))", "sum(l, n, x[l] * sum(k, n, A[k, l]))"),
        ("sum(j, n, x[j])**2", "sum(i, n, sum(j, n, x[i] * x[j]))"),
        ("(A @ B).T", "B.T @ A.T"),
        ("A @ (B @ A)", "A @ B @ A"),
        ("sum(j, n, x[sigma(j)])", "sum(j, n, x[j])"),
        ("sum(j, n, x[sigma(j)] * x[sigma(j)])", "sum(j, n, x[j]**2)"),
        ("sum(j, n + 2, 1)", "n + 2"),
        ("A @ eye(n)", "A"),
        ("softmax(A + i * 0)[i, j]", "exp(A[i, j]) / sum(l, n, exp(A[i, l]))"),
        ("exp(x[i] + x[j]) / exp(x[j])", "exp(x[i])"),
        ("diff(sum(j, n, x[j]**2), x[i])", "2 * x[i]"),
    ],
)
def test_true_equation_is_accepted(start, step):
    assert proofs.verify(_proof(start, step)).n_steps == 1


def _proof(start, step):
    return f"""
    title = "x"
    statement = "x"
    sizes = ["n", "m"]
    permutations = ["sigma"]
    indices = {{ i = "n", j = "n" }}
    arrays = {{ x = ["n"], A = ["n", "n"], B = ["n", "n"] }}
    [[part]]
    start = "{start}"
    [[part.step]]
    equals = "{step}"
    """


def test_induction_must_end_at_its_claim():
    values = source("receptive-field")
    values["part"][0]["induction"]["step"].pop()
    values["part"][0]["induction"]["claim"] = "b[n] == 2 * (k + 1)**n"
    with pytest.raises(ProblemError, match=r"this step does not hold|what was to be shown"):
        proofs.verify(toml_document(values))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('title = "x"\nstatement = "y"\n', "the key 'part' is missing"),
        (_proof("x[", "1"), "line 9: cannot read 'x\\['"),
        (_proof("y", "1"), "'y' is unknown"),
        (_proof("wombat(1)", "1"), "cannot read 'wombat\\(1\\)'"),
        (_proof("__import__('os')", "1"), "is not part of the language of proofs"),
        (_proof("x[i, j]", "1"), "has 2 indices; expected at most 1"),
        (_proof("A @ ones", "1"), "'ones' is unknown"),
        (_proof("x[i]", "1").replace('x = ["n"]', 'x = ["m"]'), "counts to n, not to m"),
        (_proof("x[i]", "1").replace('x = ["n"]', 'x = ["q"]'), "'q' is not a size"),
    ],
)
def test_invalid_proof_raises_one_sentence(text, why):
    with pytest.raises(ProblemError, match=why):
        proofs.verify(text)


@pytest.mark.bad_input
def test_claim_about_a_sum_of_terms_is_rejected():
    values = source("receptive-field")
    values["part"][0]["induction"] |= {"claim": "b[n] + 1 == (k + 1)**n + 1", "base": [{"equals": "(k + 1)**0 + 1"}]}
    with pytest.raises(ProblemError, match=r"must be an entry, a sum over an index or a delta, got 'b\[n\] \+ 1'"):
        proofs.verify(toml_document(values))


@pytest.mark.bad_input
def test_unknown_proof_lists_names():
    with pytest.raises(ClearheadError, match=r"no proof is called 'wombat'; expected one of .*weights-sum-to-one"):
        proofs.prove("wombat")


@pytest.mark.parametrize("name", NAMES)
def test_every_format_contains_every_step(name):
    proof = proofs.prove(name)
    document = json.loads(json.dumps(proofs.to_dict(proof)))
    formulas = [line for part in document["parts"] for chain in part["chains"] for line in chain["lines"]]
    assert sum(bool(line["relation"]) for line in formulas) == document["verified_steps"] == proof.n_steps
    text, page, tex = proofs.terminal(proof), proofs.html(proof), proofs.latex(proof)
    blocks = [token for token in MarkdownIt().parse(proofs.markdown(proof)) if token.type == "fence"]
    assert len(blocks) == sum(len(part["chains"]) for part in document["parts"])
    squeezed = " ".join(text.split())
    for line in formulas:
        assert line["text"] in squeezed
        assert any(line["text"] in block.content for block in blocks)
        assert line["latex"] in tex
        assert to_typst(line["latex"])
    assert page.count("<tr>") == len(formulas)
    assert not re.search(r"\w_[{\w]", re.sub(r"<[^>]*>", "", page.partition("<body")[2])), "indices are lowered"
    assert max(map(len, text.splitlines())) <= 80
    assert tex.isascii()
    assert "[U+" not in tex, "every character has a LaTeX command"
    assert not re.search(r"\w\\_", tex), "indices are lowered"


def test_weights_sum_to_one_prints_reasons():
    text = str(proofs.prove("weights-sum-to-one"))
    assert "= Z / Z" in text
    assert "[definition of the weights]" in text
