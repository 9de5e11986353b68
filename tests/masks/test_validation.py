"""Invalid masks, arguments, sizes and tensors raise errors that state the cause and the remedy."""

from __future__ import annotations

import pytest
import torch

from clearhead.errors import DtypeError, MaskError, MaskTypeError, ShapeError
from clearhead.masks import (
    allow,
    as_mask,
    blocks,
    causal,
    dilated,
    documents,
    every,
    forbid,
    full,
    padding,
    prefix,
    scattered,
    window,
)

pytestmark = pytest.mark.bad_input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: window(-1, 0), "window's before is -1; expected a whole number of at least 0"),
        (lambda: window(0, None), "window's after is None; expected a whole number of at least 0"),
        (lambda: window(1.5, 0), "window's before is 1.5; expected a whole number"),
        (lambda: window(True, 0), "window's before is True; expected a whole number"),
        (lambda: every(0), "the step of every is 0; expected a whole number of at least 1"),
        (lambda: every(3, -1), "the start of every is -1; expected a whole number of at least 0"),
        (lambda: dilated(0), "the step of dilated is 0; expected a whole number of at least 1"),
        (lambda: prefix(-1), "the n of prefix is -1; expected a whole number of at least 0"),
        (lambda: prefix(2**31), "the n of prefix is 2147483648; expected a whole number of at most 2147483647"),
        (lambda: prefix([3]), r"the n of prefix is \[3\]; expected a whole number"),
        (lambda: blocks(0), "the size of blocks is 0; expected a whole number of at least 1"),
        (lambda: blocks("3"), "the size of blocks is '3'; expected a whole number"),
        (lambda: scattered(0, 1), "the per_row of scattered is 0; expected a whole number of at least 1"),
        (lambda: scattered(1, -1), "the seed of scattered is -1; expected a whole number of at least 0"),
    ],
)
def test_invalid_arguments_raise_mask_error(make, message):
    with pytest.raises(MaskError, match=message):
        make()


def test_numpy_integers_are_accepted():
    numpy = pytest.importorskip("numpy", reason="numpy integers are only tested where numpy is installed")
    assert window(numpy.int64(2), numpy.uint8(1)) == window(2, 1)
    assert causal().count(numpy.int32(5)) == 15


@pytest.mark.parametrize(
    "mask",
    [
        causal(),
        window(2, 2),
        dilated(3),
        blocks(4),
        scattered(2, 0),
        documents([0] * 9),
        every(2).T,
        prefix(2).T,
        padding([3]).T,
        every(2) & ~causal(),
    ],
    ids=str,
)
def test_unequal_lengths_without_offset_raise_mask_error(mask):
    for use in (mask.dense, mask.count, mask.density, mask.draw, mask.check, mask.may_be_empty):
        with pytest.raises(
            MaskError, match="T=3 queries with S=7 keys do not determine them; pass query_offset"
        ) as caught:
            use(3, 7)
        assert "query_offset=4 if the queries are the last 3 of the 7 keys" in str(caught.value)
    with pytest.raises(MaskError, match=r"pass query_offset, the position of the first query among the keys$"):
        mask.check(7, 3)
    assert mask.check(3, 7, 4) == 4
    assert mask.check(7) == mask.check(7, 7) == 0


@pytest.mark.parametrize("mask", [full(), every(3), prefix(2), padding([3]), every(2) | ~prefix(3)], ids=str)
def test_masks_of_keys_only_need_no_offset(mask):
    assert mask.check(3, 7) == 0
    assert torch.equal(mask.dense(3, 7), mask.dense(3, 7, query_offset=11))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), r"T \(the number of queries\) is -1; expected between 0 and 2147483647"),
        ((3, -7), r"S \(the number of keys\) is -7"),
        ((3, 7, -1), r"query_offset \(the position of the first query among the keys\) is -1"),
        ((2**31,), "is 2147483648; expected between 0 and 2147483647"),
        ((2.0,), r"T \(the number of queries\) is 2.0; expected a whole number"),
        ((True,), "is True; expected a whole number"),
        ((3, torch.tensor(7)), "expected a whole number"),
    ],
)
def test_invalid_sizes_raise_mask_error(arguments, message):
    with pytest.raises(MaskError, match=message):
        causal().check(*arguments)


@pytest.mark.parametrize("value", [torch.ones(3, 3, dtype=torch.bool), torch.ones(3, 3)])
def test_bare_tensor_raises_naming_allow_and_forbid(value):
    for use in (
        as_mask,
        lambda x: causal() & x,
        lambda x: causal() | x,
        lambda x: x & causal(),
        lambda x: x | causal(),
    ):
        with pytest.raises(MaskTypeError) as caught:
            use(value)
        message = str(caught.value)
        assert f"a tensor of {value.dtype} and shape (3, 3)" in message
        assert "allow(tensor) if True may attend, as in scaled_dot_product_attention" in message
        assert "forbid(tensor) if True is hidden, as in nn.MultiheadAttention" in message
        assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("value", [True, "causal()", 3, [causal()], causal])
def test_other_types_raise_mask_type_error(value):
    for use in (as_mask, lambda x: causal() & x, lambda x: x | causal()):
        with pytest.raises(MaskTypeError, match=rf"got {type(value).__name__} .* expected a Mask such as"):
            use(value)


def test_truth_value_raises_mask_type_error():
    for use in (lambda: causal() and full(), lambda: causal() or full(), lambda: not causal()):
        with pytest.raises(MaskTypeError, match=r"combine masks with & \| ~ \(not with and, or, not\)"):
            use()


@pytest.mark.parametrize(("make", "meaning"), [(allow, "may attend"), (forbid, "is hidden")])
def test_tables_of_wrong_dtype_or_shape_raise(make, meaning):
    name = make.__name__
    with pytest.raises(DtypeError, match=rf"{name} got a tensor of torch.float32.*whose True {meaning}"):
        make(torch.zeros(3, 3))
    with pytest.raises(DtypeError, match=f"{name} got list; expected a bool tensor"):
        make([[True]])
    with pytest.raises(ShapeError, match=rf"{name} got a tensor of shape \(3,\); expected \(…, T, S\)"):
        make(torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: padding(torch.tensor([1.0])), DtypeError, "the lengths of padding have dtype torch.float32"),
        (lambda: padding(torch.tensor([True])), DtypeError, "the lengths of padding have dtype torch.bool"),
        (lambda: padding(5), DtypeError, r"the lengths of padding is 5; .* use prefix\(n\)"),
        (lambda: documents([[1, 2], [3]]), DtypeError, "the ids of documents cannot be converted to a tensor"),
        (
            lambda: padding([1, 2], left_pad=[0.5, 1.0]),
            DtypeError,
            "the left_pad of padding have dtype torch.float32",
        ),
        (
            lambda: padding([1, 2], left_pad=[1, 2, 3]),
            ShapeError,
            r"lengths of shape \(2,\) and left_pad of shape \(3,\)",
        ),
        (lambda: documents(torch.tensor(3)), ShapeError, "documents got a scalar"),
        (
            lambda: causal().allows(torch.zeros(3), torch.arange(3), keys=3),
            DtypeError,
            "p has dtype torch.float32; expected integer positions",
        ),
        (lambda: causal().allows(1, torch.arange(3), keys=3), DtypeError, "p is a int; expected a tensor of integer"),
        (lambda: causal().allows(torch.tensor(1), torch.tensor(0), keys=-3), MaskError, "keys is -3; expected between"),
    ],
    ids=[
        "floats",
        "bools",
        "number",
        "ragged",
        "float padding",
        "two shapes",
        "scalar",
        "float positions",
        "plain position",
        "negative keys",
    ],
)
def test_invalid_tensors_raise_dtype_or_shape_error(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_tensors_of_wrong_size_raise_shape_error():
    mask = allow(torch.ones(3, 5, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"allow\(tensor\) contains a tensor of 3 × 5, but 5 × 3 is expected"):
        mask.dense(5, 3)
    with pytest.raises(ShapeError, match=r"3 × 5, but 5 × 3 is expected \(the mask is under .T\)"):
        (causal() & mask.T).count(3, 5, query_offset=0)
    with pytest.raises(ShapeError, match=r"documents\(ids\) has ids for 5 positions, but S=7 keys with T=7 .* need 7"):
        documents([0] * 5).dense(7)
    with pytest.raises(ShapeError, match=r"has ids for 5 positions, but S=5 keys with T=2 queries from .* 4 need 6"):
        documents([0] * 5).dense(2, 5, query_offset=4)
    with pytest.raises(ShapeError, match=r"shapes \(2, 1\) and \(3, 1\) do not broadcast \(2 against 3\)"):
        padding([1, 2]) & padding([1, 2, 3])
