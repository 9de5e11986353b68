"""Tests of rotary positions against complex multiplication and transformers' Llama."""

from __future__ import annotations

import cmath

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import ConfigError, ShapeError
from clearhead.nn.positions import Rotary
from tests.support.rounding import assert_equal_up_to_rounding


def by_complex_numbers(x: torch.Tensor, positions: list[int], base: float) -> torch.Tensor:
    """Features i and i + D/2 as one complex number, times e^{i·angle}, one number at a time."""
    D = x.shape[-1]
    out = x.clone()
    for index in torch.cartesian_prod(*(torch.arange(n) for n in (*x.shape[:-1], D // 2))).tolist():
        *head, t, i = index
        at = (*head, t)
        rotated_pair = complex(x[at][i], x[at][i + D // 2]) * cmath.exp(1j * positions[t] * base ** (-2 * i / D))
        out[at][i], out[at][i + D // 2] = rotated_pair.real, rotated_pair.imag
    return out


@pytest.mark.parametrize("base", [10000.0, 53.0])
def test_rotate_equals_complex_multiplication(base):
    x = torch.randn(2, 3, 5, 14, dtype=torch.float64)
    positions = [0, 1, 7, 19, 1003]
    got = Rotary(base=base).rotate(x, torch.tensor(positions))
    torch.testing.assert_close(got, by_complex_numbers(x, positions, base), rtol=0, atol=1e-11)


def test_partial_rotary_factor_rotates_first_features_only():
    x = torch.randn(2, 5, 20, dtype=torch.float64)
    positions = [3, 4, 5, 6, 7]
    got = Rotary(partial_rotary_factor=0.3).rotate(x, torch.tensor(positions))
    assert torch.equal(got[..., 6:], x[..., 6:])
    torch.testing.assert_close(got[..., :6], by_complex_numbers(x[..., :6], positions, 10000.0), rtol=0, atol=1e-11)


def test_rotate_accepts_positions_per_batch_row():
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    positions = torch.tensor([[0, 0, 0, 1, 2], [3, 4, 5, 6, 7]])
    got = Rotary().rotate(x, positions)
    for row in range(2):
        assert_equal_up_to_rounding(got[row], Rotary().rotate(x[row], positions[row]))


def test_rotate_equals_transformers_llama():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    D, positions = 22, torch.tensor([0, 3, 5, 11, 401])
    config = LlamaConfig(hidden_size=3 * D, num_attention_heads=3, head_dim=D)
    q, k = torch.randn(2, 3, 5, D), torch.randn(2, 1, 5, D)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions.expand(2, -1))
    for got, expected in zip(
        (Rotary().rotate(q, positions), Rotary().rotate(k, positions)),
        apply_rotary_pos_emb(q, k, cos, sin),
        strict=True,
    ):
        # Theirs has float32 angles: rounding of the frequency and of the product with positions up to 401.
        torch.testing.assert_close(got, expected, rtol=0, atol=4 * 401 * 2**-23)


def test_interleaved_pairing_equals_half_split_after_reordering_features():
    """The paper turns neighbours 2i and 2i + 1: the features 0, 2, 4, …, 1, 3, 5, … brought to our order."""
    x, positions = torch.randn(5, 14, dtype=torch.float64), torch.tensor([2, 3, 5, 7, 11])
    angle = positions[:, None] * 10000.0 ** (-torch.arange(0, 14, 2, dtype=torch.float64) / 14)
    neighbours = torch.view_as_complex(x.unflatten(-1, (7, 2))) * torch.polar(torch.ones_like(angle), angle)
    paper = torch.view_as_real(neighbours).flatten(-2)

    order = torch.cat((torch.arange(0, 14, 2), torch.arange(1, 14, 2)))
    torch.testing.assert_close(Rotary().rotate(x[:, order], positions), paper[:, order], rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=25)
@given(
    p=st.integers(0, 5000),
    j=st.integers(0, 5000),
    shift=st.integers(0, 100_000),
    partial_rotary_factor=st.sampled_from([0.5, 1.0]),
)
def test_scores_depend_on_distance_only_and_norms_are_preserved(p, j, shift, partial_rotary_factor):
    rotary = Rotary(partial_rotary_factor=partial_rotary_factor)
    generator = torch.Generator().manual_seed(p * 5003 + j)
    q, k = torch.randn(2, 1, 44, dtype=torch.float64, generator=generator)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        return (rotary.rotate(q, torch.tensor([at_q])) * rotary.rotate(k, torch.tensor([at_k]))).sum()

    torch.testing.assert_close(score(p + shift, j + shift), score(p, j), rtol=0, atol=1e-8)
    torch.testing.assert_close(rotary.rotate(q, torch.tensor([p])).norm(), q.norm(), rtol=1e-12, atol=0)


def test_scores_differ_between_distances():
    q, k = torch.ones(1, 2), torch.ones(1, 2)
    near = (Rotary().rotate(q, torch.tensor([0])) * k).sum()
    far = (Rotary().rotate(q, torch.tensor([2])) * k).sum()
    assert (near - far).abs() > 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotate_in_half_precision_rounds_once(dtype):
    x = torch.randn(3, 7, 10).to(dtype)
    positions = torch.arange(7) + 40_009
    exact = Rotary().rotate(x.double(), positions)
    got = Rotary().rotate(x, positions)
    assert got.dtype == dtype
    # Correct rounding of a float32 result: at most half a unit in the last place, and a hair.
    unit = torch.finfo(dtype).eps * 2.0 ** exact.abs().clamp(min=1e-4).log2().floor()
    assert ((got.double() - exact).abs() <= 0.51 * unit + 1e-6).all()


def test_rotate_gradients_equal_finite_differences():
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([2, 5, 11])
    assert torch.autograd.gradcheck(lambda x: Rotary(partial_rotary_factor=2 / 3).rotate(x, positions), (x,))


@pytest.mark.parametrize(("partial_rotary_factor", "width"), [(1.0, 7), (0.5, 6), (0.25, 10), (0.1, 10), (1.0, 1)])
def test_odd_rotary_dim_raises(partial_rotary_factor, width):
    with pytest.raises(ShapeError, match=f"of {width} features per head; expected an even number"):
        Rotary(partial_rotary_factor=partial_rotary_factor).rotate(torch.zeros(3, width), torch.arange(3))


def test_rotate_with_wrong_positions_raises(unchecked):
    with pytest.raises(ShapeError, match=r"positions have shape \(4,\) and x has shape \(2, 3, 5, 6\)"):
        Rotary().rotate(torch.zeros(2, 3, 5, 6), torch.arange(4))


@pytest.mark.parametrize(
    "fields", [{"partial_rotary_factor": 0}, {"partial_rotary_factor": 1.5}, {"base": 1}, {"base": None}]
)
def test_rotary_with_invalid_values_raises(unchecked, fields):
    with pytest.raises(ConfigError, match=f"Rotary: {next(iter(fields))} is "):
        Rotary(**fields)


@pytest.mark.compiled
def test_rotate_compiles_to_a_full_graph():
    rotary = Rotary(partial_rotary_factor=0.5)
    compiled = torch.compile(rotary.rotate, fullgraph=True, dynamic=True)
    for T, start in ((5, 0), (7, 13)):
        x, positions = torch.randn(2, 3, T, 8), torch.arange(start, start + T)
        torch.testing.assert_close(compiled(x, positions), rotary.rotate(x, positions), rtol=0, atol=1e-6)
