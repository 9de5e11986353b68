"""The notation: round trips, precedence, errors with their column, and adversarial input."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead._core.token_parser import MAX_TEXT
from clearhead.errors import MaskError, ParseError
from clearhead.masks import (
    Leaf,
    allow,
    axis,
    blocks,
    causal,
    clamped,
    dilated,
    documents,
    every,
    forbid,
    full,
    padding,
    parse,
    prefix,
    scattered,
    window,
)
from clearhead.masks.base import MAX_DEPTH, MAX_INTEGER, MAX_NODES
from clearhead.masks.heads import Head
from clearhead.masks.parse import STRUCTURAL_NAMES, TOKEN
from tests.support.mask_strategies import masks
from tests.support.work_counters import Effort


@given(masks)
@settings(max_examples=300)
def test_parse_of_str_returns_equal_mask(mask):
    assert parse(str(mask)) == mask
    assert repr(mask) == str(mask)


def structural_leaf_classes(base=Leaf):
    """Return the classes of leaves without tensors that users can build; `Head` only occurs in parts of `per_head`."""
    classes = set()
    for subclass in base.__subclasses__():
        if subclass.__module__.startswith("clearhead.") and subclass.is_structural:
            classes |= {subclass} | structural_leaf_classes(subclass)
    return classes - {Head}


@given(st.data())
@settings(max_examples=200)
def test_parse_of_to_text_returns_equal_mask_for_every_leaf_class(data):
    """Every class is found by itself, so a new kind of mask without notation fails."""
    leaf_class = data.draw(st.sampled_from(sorted(structural_leaf_classes(), key=lambda each: each.__name__)))
    arguments = [data.draw(st.integers(1, MAX_INTEGER)) for _ in leaf_class.__match_args__]
    leaf = leaf_class(*arguments)
    assert leaf_class.__name__.lower() in STRUCTURAL_NAMES
    assert leaf.arguments() == tuple(arguments)
    for mask in (leaf, ~leaf, leaf.T, leaf & causal(), leaf | ~leaf):
        assert parse(mask.to_text()) == mask
        assert type(mask).from_text(mask.to_text()) == mask


@pytest.mark.parametrize("mask", [padding([3]), causal() & ~documents([0, 1])], ids=str)
def test_to_text_of_mask_with_tensors_raises(mask):
    with pytest.raises(MaskError, match="contains data"):
        mask.to_text()


@given(masks)
def test_parse_matches_python_evaluation(mask):
    # Python's own precedence is the oracle: the notation is Python's.
    constructors = (full, causal, window, clamped, every, dilated, prefix, blocks, scattered, axis)
    names = {f.__name__: f for f in constructors}
    assert eval(str(mask), {"__builtins__": {}}, names) == mask


@given(masks)
def test_str_has_no_redundant_parentheses(mask):
    text = str(mask)
    opened = []
    for index, character in enumerate(text):
        if character == "(":
            opened.append(index)
        elif character == ")":
            start = opened.pop()
            if start == 0 or not (text[start - 1].isalpha() or text[start - 1] == "="):  # not of a call or a tuple
                without = text[:start] + text[start + 1 : index] + text[index + 1 :]
                assert parse(without) != mask


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("full()", full()),
        ("  causal ( ) ", causal()),
        ("window(2,1)", window(2, 1)),
        ("window(before=2, after=1)", window(2, 1)),
        ("window(2, after=1)", window(2, 1)),
        ("every(4)", every(4, 0)),
        ("every(4, 1)", every(4, start=1)),
        ("every(start=1, step=4)", every(4, start=1)),
        ("prefix(1_000)", prefix(1000)),
        ("scattered(3, seed=7)", scattered(3, 7)),
        ("full() | causal() & dilated(2)", full() | (causal() & dilated(2))),
        ("(full() | causal()) & dilated(2)", (full() | causal()) & dilated(2)),
        ("~causal() & full()", (~causal()) & full()),
        ("~causal().T", ~(causal().T)),
        ("(~causal()).T", (~causal()).T),
        ("~~causal()", causal()),
        ("~~~causal()", ~causal()),
        ("causal().T.T.T", causal().T),
        ("causal()\n  & (window(256, 0)\n  | every(64))", causal() & (window(256, 0) | every(64))),
        ("((((blocks(3)))))", blocks(3)),
        ("causal() & (full() & dilated(2))", causal() & full() & dilated(2)),
    ],
)
def test_parse_accepts_notation(text, mask):
    assert parse(text) == mask


def test_parse_binds_data_by_name():
    lengths, starts = torch.tensor([3, 5]), torch.tensor([1, 0])
    ids, table = torch.tensor([0, 0, 1]), torch.ones(3, 3, dtype=torch.bool)
    text = "causal() & padding(lengths) & padding(l, left_pad=starts) & documents(ids) & ~allow(a) | forbid(a)"
    mask = parse(text, lengths=lengths, l=lengths, starts=starts, ids=ids, a=table)
    expected = (
        causal() & padding(lengths) & padding(lengths, left_pad=starts) & documents(ids) & ~allow(table)
    ) | forbid(table)
    assert mask == expected
    assert str(mask) == text
    assert str(padding(lengths, left_pad=starts)) == "padding(lengths, left_pad=left_pad)"
    assert parse("padding(text)", text=lengths) == padding(lengths)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 1, "the text ends"),
        ("   ", 4, "the text ends"),
        ("causal() &", 11, "the text ends"),
        ("causal() & & full()", 12, "got '&'"),
        ("| full()", 1, "got '|'"),
        ("causal() full()", 10, "expected &, | or .T before 'full'"),
        ("causal", 7, "expected ( after causal"),
        ("(causal()", 1, "never closed"),
        ("causal())", 9, "no opening parenthesis"),
        ("()", 2, "got ')'"),
        ("cuasal() | full()", 1, "unknown mask 'cuasal'; did you mean 'causal'?"),
        ("full() | forbid()", 10, "forbid needs tensor: forbid(tensor)"),
        ("window(2)", 1, "window needs after: window(before, after)"),
        ("window(2, 3, 4)", 14, "too many arguments: window(before, after)"),
        ("window(2, before=3)", 11, "before is repeated"),
        ("every(4, strat=1)", 10, "no argument 'strat'; did you mean 'start'?: every(step, start=…)"),
        ("every()", 1, "every needs step"),
        ("every(0)", 1, "the step of every is 0; expected a whole number of at least 1"),
        ("full() & window(-1, 2)", 10, "window's before is -1; expected a whole number of at least 0"),
        ("prefix(99999999999)", 1, "at most 2147483647"),
        (f"prefix({'9' * 50})", 8, "too large for n"),
        ("prefix(1.5)", 9, "expected , or )"),
        ("prefix(x)", 8, "expected an integer for n"),
        ("prefix(1 2)", 10, "expected , or )"),
        ("prefix(1", 9, "the bracket of prefix( is not closed"),
        ("prefix(", 8, "the bracket of prefix( is not closed: prefix(n)"),
        ("causal(", 8, "the bracket of causal( is not closed"),
        ("prefix(,)", 8, "expected an integer"),
        ("prefix(1,)", 10, "too many arguments"),
        ("causal().U", 10, "expected T after the dot"),
        ("causal().", 10, "expected T after the dot"),
        ("causal()..T", 10, "expected T after the dot"),
        ("causal() && full()", 11, "got '&'"),
        ("causal() and full()", 10, "expected &, | or .T before 'and'"),
        ("causal() ^ full()", 10, "'^' is unexpected here"),
        ("__import__('os')", 12, "is unexpected here"),
        ("padding(lengths)", 9, "no tensor named 'lengths'"),
        ("documents(3)", 11, "expected the name of a tensor for ids"),
        ("кausal()", 1, "is unexpected here"),
        ("prefix(٣)", 8, "is unexpected here"),
    ],
)
def test_invalid_text_raises_parse_error_with_column(text, column, message):
    with pytest.raises(ParseError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert caught.value.column == column
    assert caught.value.text == text
    assert str(caught.value).startswith(f"column {column}: ")


@pytest.mark.bad_input
def test_error_caret_points_at_the_column():
    with pytest.raises(ParseError) as caught:
        parse("window(2, 2) | cuasal()")
    first, excerpt, caret = str(caught.value).splitlines()
    assert first == "column 16: unknown mask 'cuasal'; did you mean 'causal'?"
    assert excerpt == "  window(2, 2) | cuasal()"
    assert caret.index("^") == excerpt.index("cuasal")


def test_parse_accepts_a_literal_length():
    assert torch.equal(parse("padding(4)").dense(7, 7), padding([4]).dense(7, 7))


@pytest.mark.bad_input
def test_error_truncates_long_text():
    text = "full() | " * 50 + "oops() " + "| full()" * 50
    with pytest.raises(ParseError) as caught:
        parse(text)
    first, excerpt, caret = str(caught.value).splitlines()
    assert first.startswith("column 451: unknown mask 'oops'; known: full, causal, window, ")
    assert len(excerpt) < 90
    assert excerpt[caret.index("^") :].startswith("oops()")
    assert excerpt.startswith("  …")
    assert excerpt.endswith("…")


@pytest.mark.bad_input
def test_invalid_data_raises_parse_error_with_column():
    with pytest.raises(ParseError, match=r"column 12: the lengths of padding have dtype torch.float32"):
        parse("causal() & padding(x)", x=torch.ones(3))
    with pytest.raises(ParseError, match=r"allow got a tensor of torch.int64"):
        parse("allow(x)", x=torch.arange(3))
    with pytest.raises(ParseError, match="did you mean 'lengths'"):
        parse("padding(lenghts)", lengths=torch.arange(3))
    with pytest.raises(ParseError, match="do not broadcast"):
        parse("padding(a) & padding(b)", a=torch.arange(3), b=torch.arange(5))
    with pytest.raises(ParseError, match="got int; expected the text of a mask"):
        parse(3)


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_parse_reads_largest_expressions():
    deep = causal()
    for level in range((MAX_DEPTH - 1) // 2):
        deep = ~(deep | full()) if level % 2 else ~(deep & full())
    assert parse(str(deep)) == deep
    wide = full()
    for _ in range(MAX_NODES - 3):
        wide = wide | scattered(MAX_INTEGER, MAX_INTEGER)
    assert wide.nodes >= MAX_NODES - 2
    assert len(str(wide)) < MAX_TEXT
    assert parse(str(wide)) == wide


def test_deep_expressions_use_little_python_stack():
    deep = causal()
    for _ in range(MAX_DEPTH // 4 - 1):
        deep = (~(deep & every(3)).T | window(1, 1)) & full()
    assert deep.depth > MAX_DEPTH - 5
    frame, used = sys._getframe(), 0
    while frame is not None:
        frame, used = frame.f_back, used + 1
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(used + 8 * MAX_DEPTH)
    try:
        assert hash(deep) == hash(parse(str(deep)))
        assert deep == parse(str(deep))
        assert deep.count(13) == int(deep.dense(13).sum())
        assert deep.may_be_empty(13) in (True, False)
        assert "■" in str(deep.draw(13))
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.bad_input
def test_too_deep_or_large_expressions_raise():
    def repeat(step):
        mask = causal() & every(2)
        for _ in range(MAX_DEPTH):
            mask = step(mask)

    with pytest.raises(MaskError, match=f"{MAX_DEPTH + 1} deep"):
        repeat(lambda mask: ~(mask & full()))
    with pytest.raises(MaskError, match=f"at most {MAX_DEPTH} and {MAX_NODES}"):
        repeat(lambda mask: mask | mask.T)  # doubles: without a bound this would be 2¹⁰⁰ masks
    with pytest.raises(ParseError, match="nest more than 100 deep"):
        parse("(" * 5000 + "full()" + ")" * 5000)
    with pytest.raises(ParseError, match="deep"):
        parse("~(full() & " * 99 + "full()" + ")" * 99)
    with pytest.raises(ParseError, match="has 1001 masks"):
        parse("|".join(["full()"] * 1000))
    with pytest.raises(ParseError, match="expected at most 65536"):
        parse(" " * (MAX_TEXT + 1))
    assert parse("~" * 20_000 + "full()") == full()
    assert parse("full()" + ".T" * 20_001) == full().T
    assert parse("(" * 100 + "full()" + ")" * 100) == full()


SIGNS = [
    "(",
    ")",
    "&",
    "|",
    "~",
    ".",
    ",",
    "=",
    "T",
    ".T",
    "x",
    "lengths",
    "0",
    "1",
    "-3",
    "4_",
    "99999999999999",
]
CALLS = [
    "full()",
    "causal()",
    "window(1, 2)",
    "every(",
    "start=",
    "window",
    "padding(",
    "allow",
    "scattered(3,",
]
NOISE = ["\n", "'", "\\", "\x00", "é", "__class__", "lambda", "#", "-", "_"]
token_soup = st.lists(st.sampled_from(SIGNS + CALLS + NOISE), max_size=30).map("".join)


@given(st.text() | token_soup | st.binary().map(lambda b: b.decode("latin-1")))
@settings(max_examples=1000)
def test_arbitrary_text_parses_or_raises_parse_error(text):
    data = {"lengths": torch.tensor([3, 5]), "x": torch.tensor([0])}
    column, mask = 1, full()
    try:
        mask = parse(text, **data)
    except ParseError as error:
        column = error.column
    assert 1 <= column <= len(text) + 1
    assert parse(str(mask), **data) == mask


class CopyCountingStr(str):
    """A string that counts the characters copied from it."""

    copied = 0

    def __getitem__(self, key):
        part = super().__getitem__(key)
        self.copied += len(part)
        return part


def scanned_characters(text):
    """Return the number of characters that the pattern of tokens scans; without a match, all remaining ones."""
    position = scanned = 0
    while position < len(text):
        match = TOKEN.match(text, position)
        scanned += (match.end() if match else len(text)) - position
        position = match.end() if match else position + 1
    return scanned


@pytest.mark.parametrize(
    "make",
    [
        lambda n: " " * n,
        lambda n: "(" * n,
        lambda n: "~" * n,
        lambda n: "full()" + ".T" * (n // 2),
        lambda n: "full()&" * (n // 7),
        lambda n: "a" * n,
        lambda n: "prefix(" + "1" * n,
        lambda n: "prefix(" + "1_" * (n // 2),
        lambda n: "full()" + " " * n + "?",
        lambda n: "every(1," * (n // 8),
        lambda n: "full( " * (n // 6),
        lambda n: "-" * n,
    ],
)
def test_parse_takes_linear_work(make):
    """Work is calls, and characters copied from the text or scanned by the pattern."""

    def work(n: int) -> int:
        text = CopyCountingStr(make(n))
        with Effort() as took, contextlib.suppress(ParseError):
            parse(text)
        return took.calls + text.copied + scanned_characters(text)

    # Eight times the text: quadratic would be 64 times the work.
    assert work(32_000) < 9 * work(4_000)
