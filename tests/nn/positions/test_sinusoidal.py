"""Tests of sinusoidal positions against the paper's formula in plain Python, at near and far positions."""

from __future__ import annotations

import math

import pytest
import torch

from clearhead.errors import ConfigError, ShapeError
from clearhead.nn.positions import Sinusoidal


def formula(position: int, width: int, base: float = 10000.0) -> list[float]:
    """One row, number by number, in Python's floats."""
    row = []
    for i in range(width // 2):
        angle = position / base ** (2 * i / width)
        row += [math.sin(angle), math.cos(angle)]
    return row


def test_table_equals_worked_example_at_position_3():
    row = Sinusoidal().table(5, 512)[3]
    for got, expected in zip(row[:4].tolist(), [0.14112, -0.98999, 0.24509, -0.96950], strict=True):
        assert got == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("base", [10000.0, 97.0])
def test_table_equals_formula(base):
    table = Sinusoidal(base).table(7, 22, start=13, dtype=torch.float64)
    expected = torch.tensor([formula(p, 22, base) for p in range(13, 20)], dtype=torch.float64)
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-13)


def test_table_has_default_or_requested_dtype():
    assert Sinusoidal().table(3, 4).dtype == torch.float32
    assert Sinusoidal().table(3, 4, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("position", [100_000, 1_000_003])
def test_table_at_far_positions_is_exact_to_float32(position):
    row = Sinusoidal().table(1, 514, start=position)[0].double()
    exact = torch.tensor(formula(position, 514), dtype=torch.float64)
    # One rounding to float32 of a number of size at most 1, and the float64 angle's own error.
    bound = 2**-25 + position * 2**-51
    assert (row - exact).abs().max() <= bound


def test_float32_angles_exceed_the_error_bound():
    """The reason for float64: the same table with float32 angles is wrong in the third decimal at 100,000."""
    pair = torch.arange(0, 514, 2)
    angle = 100_000 * 10000.0 ** (-pair.float() / 514)
    naive = torch.stack((angle.sin(), angle.cos()), -1).flatten()
    assert (naive - Sinusoidal().table(1, 514, start=100_000)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_module_adds_table_and_keeps_dtype(dtype):
    module = Sinusoidal().build(d_model=22).to(dtype)
    x = torch.randn(2, 5, 22).to(dtype)
    out = module(x, torch.arange(5) + 11)
    assert out.dtype == dtype
    assert torch.equal(out, x + Sinusoidal().table(5, 22, start=11, dtype=dtype))
    assert torch.equal(module(x), x + Sinusoidal().table(5, 22, dtype=dtype))


def test_module_accepts_positions_per_batch_row():
    module = Sinusoidal().build(d_model=6)
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 1, 2, 3], [7, 6, 5, 4, 3]])
    expected = x + torch.tensor([[formula(p, 6) for p in row] for row in positions.tolist()], dtype=x.dtype)
    torch.testing.assert_close(module(x, positions), expected, rtol=0, atol=1e-13)


def test_module_has_empty_state_dict():
    assert Sinusoidal().build(d_model=6).state_dict() == {}


def test_module_accepts_empty_and_single_token_sequences():
    module = Sinusoidal().build(d_model=4)
    assert module(torch.zeros(3, 0, 4)).shape == (3, 0, 4)
    assert module(torch.zeros(1, 4)).tolist() == [[0.0, 1.0, 0.0, 1.0]]
    assert Sinusoidal().table(0, 4).shape == (0, 4)


def test_shifted_positions_equal_rotated_encodings():
    """PE(p + k) is a linear map of PE(p), the same for every p: the reason the paper gives."""
    width, k = 10, 7
    table = Sinusoidal().table(23, width, dtype=torch.float64)
    shift = torch.zeros(width, width, dtype=torch.float64)
    for i in range(width // 2):
        angle = k / 10000 ** (2 * i / width)
        c, s = math.cos(angle), math.sin(angle)
        shift[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor([[c, s], [-s, c]], dtype=shift.dtype)
    torch.testing.assert_close(table[:-k] @ shift.T, table[k:], rtol=0, atol=1e-13)


@pytest.mark.parametrize("width", [0, 1, 7])
def test_odd_width_raises(width):
    for call in (lambda: Sinusoidal().table(3, width), lambda: Sinusoidal().build(width)):
        with pytest.raises(ShapeError, match=f"width {width}; expected an even width"):
            call()


def test_module_with_wrong_shapes_raises(unchecked):
    module = Sinusoidal().build(d_model=6)
    with pytest.raises(ShapeError, match=r"x has shape \(2, 5, 7\); expected \(…, T, 6\)"):
        module(torch.zeros(2, 5, 7))
    for wrong in (torch.arange(4), torch.zeros(3, 5, dtype=torch.long), torch.tensor(0)):
        with pytest.raises(ShapeError, match=r"positions have shape .* expected one position per token, \(5,\)"):
            module(torch.zeros(2, 5, 6), wrong)
    with pytest.raises(ShapeError, match=r"x has shape \(6,\); expected \(…, T, 6\)"):
        module(torch.zeros(6))


@pytest.mark.parametrize("base", [0, 1.0, -3.0, float("inf"), float("nan"), "10000", True])
def test_invalid_base_raises(unchecked, base):
    with pytest.raises(ConfigError, match=r"Sinusoidal: base is .*; expected a number above 1"):
        Sinusoidal(base=base)


@pytest.mark.compiled
def test_module_compiles_to_a_full_graph_with_dynamic_length():
    module = Sinusoidal().build(d_model=6)
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for T, start in ((5, 0), (11, 3), (11, 100_000)):
        x, positions = torch.randn(2, T, 6), torch.arange(start, start + T)
        torch.testing.assert_close(compiled(x, positions), module(x, positions), rtol=0, atol=1e-6)


def test_split_layout_is_a_permutation_with_sines_first():
    table = Sinusoidal(97.0, layout="split").table(7, 22, start=13, dtype=torch.float64)
    expected = torch.tensor([formula(p, 22, 97.0) for p in range(13, 20)], dtype=torch.float64)
    torch.testing.assert_close(table, torch.cat((expected[:, 0::2], expected[:, 1::2]), dim=1), rtol=0, atol=1e-13)
    x = torch.randn(2, 7, 22, dtype=torch.float64)
    torch.testing.assert_close(Sinusoidal(97.0, layout="split").build(22)(x, torch.arange(13, 20)), x + table)
