"""Tests that invalid arguments of attention raise errors which state the problem and the solution."""

from __future__ import annotations

import pytest
import torch

from clearhead.attention import (
    Additive,
    Bilinear,
    GumbelSoftmax,
    HardMax,
    Scaled,
    ScaledDot,
    Softmax,
    StraightThrough,
    attend,
)
from clearhead.attention.biases import alibi
from clearhead.errors import (
    ClearheadError,
    ConfigError,
    DtypeError,
    ImplementationError,
    MaskError,
    MaskTypeError,
    ShapeError,
)
from clearhead.masks import allow, causal, padding, scattered
from clearhead.nn import KVCache, MultiHeadAttention

pytestmark = pytest.mark.bad_input


def q(*shape, dtype=torch.float32):
    return torch.ones(*(shape or (2, 3, 5, 7)), dtype=dtype)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: attend(q(5, 7), q(), q()), ShapeError, r"q has shape \(5, 7\); expected \(batch, heads"),
        (lambda: attend(q(dtype=torch.int64), q(), q()), DtypeError, "q is torch.int64.*embed ids"),
        (lambda: attend([1], q(), q()), DtypeError, "q is a list"),
        (
            lambda: attend(*[q(dtype=torch.float8_e4m3fn)] * 3),
            DtypeError,
            "q is torch.float8_e4m3fn.*16, 32 or 64 bits",
        ),
        (lambda: attend(q(), q().to("meta"), q()), DtypeError, "are on cpu, meta, cpu; move them to one device"),
        (lambda: attend(q(), q(), q(), bias=q(5, 5).to("meta")), DtypeError, "bias is on meta and q on cpu; move them"),
        (lambda: attend(q(), q(), q(), query_offset="1"), MaskError, "query_offset.* is '1'; expected a whole number"),
        (lambda: attend(q(), q(), q(), bias=alibi(3), query_offset=-1), MaskError, "query_offset.* is -1"),
        (lambda: attend(q(), q(dtype=torch.float64), q()), DtypeError, "convert them to one dtype"),
        (lambda: attend(q(), q(2, 3, 5, 11), q()), ShapeError, "queries have width 7 and keys 11.*Bilinear"),
        (lambda: attend(q(), q(2, 2, 5, 7), q(2, 2, 5, 7)), ShapeError, "3 query heads.*2 key/value heads"),
        (lambda: attend(q(), q(3, 3, 5, 7), q(3, 3, 5, 7)), ShapeError, r"batch shape \(2,\) and k \(3,\)"),
        (lambda: attend(q(), q(), q(2, 3, 11, 7)), ShapeError, "equal sizes except for the width"),
        (
            lambda: attend(q(), q(), q(), torch.ones(5, 5, dtype=torch.bool)),
            MaskTypeError,
            r"allow.*True.*forbid.*True",
        ),
        (lambda: attend(q(), q(), q(), allow(torch.ones(5, 3, dtype=torch.bool))), ClearheadError, "5"),
        (lambda: attend(q(), q(2, 3, 11, 7), q(2, 3, 11, 7), causal()), MaskError, "query_offset"),
        (
            lambda: attend(q(), q(), q(), padding([1, 2, 3])),
            ShapeError,
            r"heads\) \(3, 1\) and the queries have \(2, 3\)",
        ),
        (lambda: attend(q(), q(), q(), bias=q(4, 5)), ShapeError, r"broadcast to \(2, 3, 5, 5\)"),
        (
            lambda: attend(q(), q(), q(), bias=torch.ones(5, 5, dtype=torch.bool)),
            DtypeError,
            "a bool tensor is a mask",
        ),
        (
            lambda: attend(q(), q(), q(), bias=1.0),
            DtypeError,
            "bias is a float; expected a floating-point tensor",
        ),
        (lambda: attend(q(), q(), q(), scores="dot"), DtypeError, r"scores is 'dot'.*ScaledDot\(\)"),
        (lambda: attend(q(), q(), q(), scores=ScaledDot), DtypeError, r"scores is <class .*ScaledDot\(\)"),
        (lambda: attend(q(), q(), q(), scores=Scaled(float("nan"))), ConfigError, "scale is nan; expected a number"),
        (lambda: attend(q(), q(), q(), impl=["sdpa"]), ImplementationError, 'is unknown; choose one of "auto"'),
        (lambda: attend(q(), q(), q(), scores=Softmax()), DtypeError, r"scores is Softmax\(.*ScaledDot\(\)"),
        (lambda: attend(q(), q(), q(), normalizer=None), DtypeError, r"normalizer is None.*Softmax\(\)"),
        (lambda: attend(q(), q(), q(), normalizer=HardMax), DtypeError, r"normalizer is <class .*HardMax.*Softmax\(\)"),
        (
            lambda: attend(q(), q(), q(), impl="flash"),
            ImplementationError,
            'impl="flash" is unknown.*"sdpa"',
        ),
        (
            lambda: attend(q(), q(), q(), normalizer=HardMax(), impl="sdpa"),
            ImplementationError,
            "HardMax is not a softmax; use reference",
        ),
        (
            lambda: attend(q(), q(), q(), scores=Additive(7, 7, 3), impl="sdpa"),
            ImplementationError,
            "Additive scores are not a dot product; use reference",
        ),
        (
            lambda: attend(q(), q(), q(), normalizer=Softmax(0.0), impl="sdpa"),
            ImplementationError,
            "temperature 0",
        ),
        (
            lambda: attend(*(q(dtype=torch.float64) * 1e200,) * 3),
            ShapeError,
            "exceed the range of float64.*scale",
        ),
        (lambda: attend(q(), q(), q(), scores=Bilinear(5, 7)), ShapeError, "queries have width 7.*expects 5"),
        (lambda: attend(q(), q(), q(), scores=Bilinear(7, 7, 2)), ShapeError, "3 heads.*parameters for 2"),
        (lambda: Softmax(-1.0), ConfigError, r"Softmax: temperature is -1\.0; expected a number of at least 0"),
        (lambda: Softmax(float("nan")), ConfigError, "temperature is nan"),
        (
            lambda: Softmax(dropout=1.0),
            ConfigError,
            r"dropout is 1\.0; expected a number of at least 0 and below 1",
        ),
        (lambda: Softmax("1"), ConfigError, "Softmax: temperature is '1'; expected a number of at least 0"),
        (lambda: StraightThrough(0.0), ConfigError, "expected a number above 0"),
        (lambda: GumbelSoftmax(0.0), ConfigError, "expected a number above 0"),
        (lambda: Bilinear(0, 7), ConfigError, "d_query is 0"),
        (lambda: MultiHeadAttention("12", 3), ConfigError, "d_model is '12'; expected a whole number of at least 1"),
        (lambda: MultiHeadAttention(10, 3), ConfigError, "d_model is 10 and n_heads is 3; expected a multiple"),
        (lambda: MultiHeadAttention(12, 6, n_kv_heads=4), ConfigError, "multiple of n_kv_heads"),
        (lambda: MultiHeadAttention(0, 1), ConfigError, "d_model is 0; expected a whole number of at least 1"),
        (lambda: MultiHeadAttention(6, 2, normalizer=HardMax(), dropout=0.1), ConfigError, "HardMax has none"),
        (lambda: MultiHeadAttention(6, 2)(q(2, 5, 7)), ShapeError, "query has width 7.*length, 6"),
        (lambda: MultiHeadAttention(6, 2)(q(6)), ShapeError, "query has 1 dimension"),
        (
            lambda: MultiHeadAttention(6, 2)(q(2, 5, 6), value=q(2, 5, 6)),
            ShapeError,
            "value was given without key",
        ),
        (lambda: MultiHeadAttention(6, 2, d_key=5)(q(2, 5, 6)), ShapeError, "key is missing"),
        (
            lambda: MultiHeadAttention(6, 2)(q(2, 5, 6), mask=torch.ones(5, 5).bool()),
            MaskTypeError,
            "allow",
        ),
        (
            lambda: MultiHeadAttention(6, 2)(q(2, 5, 6), mask=causal() & scattered(2, 0), cache=KVCache()),
            MaskError,
            "cache that grows",
        ),
        (lambda: KVCache(0), ConfigError, "capacity is 0"),
        (lambda: KVCache().crop(1), ShapeError, "0 tokens to 1"),
        (lambda: KVCache().get(), ShapeError, "empty"),
        (lambda: KVCache().reorder(torch.tensor([0.0])), DtypeError, "1-D integer"),
    ],
)
def test_invalid_argument_raises_error_with_advice(call, error, message):
    with pytest.raises(error, match=message) as exception:
        call()
    assert isinstance(exception.value, ClearheadError)
    assert "\n" not in str(exception.value)


def test_append_of_other_batch_or_dtype_raises():
    cache = KVCache()
    cache.append(q(2, 3, 5, 7), q(2, 3, 5, 7))
    with pytest.raises(ShapeError, match="use a new KVCache for new sequences"):
        cache.append(q(3, 3, 1, 7), q(3, 3, 1, 7))
    with pytest.raises(DtypeError, match=r"stores torch\.float32"):
        cache.append(q(2, 3, 1, 7).double(), q(2, 3, 1, 7).double())
    cross = KVCache()
    cross.set_cross(q(), q())
    with pytest.raises(ShapeError, match="cannot grow"):
        cross.append(q(), q())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda cache: cache.crop(1.5), ShapeError, "a cache of 5 tokens to 1.5"),
        (lambda cache: cache.crop(None), ShapeError, "to None"),
        (lambda cache: cache.crop(6), ShapeError, "to 6"),
        (lambda cache: cache.reorder([0, 1]), DtypeError, "got a list"),
        (lambda cache: cache.reorder(torch.tensor([0, 2])), ShapeError, "rows contains 2.*rows 0 … 1"),
        (lambda cache: cache.reorder(torch.tensor([-1])), ShapeError, "rows contains -1"),
        (lambda cache: KVCache(2.5), ConfigError, "capacity is 2.5"),
    ],
)
def test_invalid_cache_change_raises_and_leaves_the_cache_unchanged(change, error, message):
    cache = KVCache()
    cache[0].append(q(), q())
    with pytest.raises(error, match=message):
        change(cache)
    assert cache.length == 5
    assert cache[0].get()[0].shape == (2, 3, 5, 7)
