"""Tests of learned positions: lookup, errors, and `resized` against interpolation formulas and timm."""

from __future__ import annotations

import math

import pytest
import torch

from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.nn.positions import LearnedPositions


def test_module_adds_table_rows():
    module = LearnedPositions(max_len=11).build(d_model=7)
    x = torch.randn(2, 5, 7)
    assert module.weight.shape == (11, 7)
    assert torch.equal(module(x), x + module.weight[:5])
    assert torch.equal(module(x, torch.arange(6, 11)), x + module.weight[6:])
    rows = torch.tensor([[0, 0, 1, 2, 3], [10, 9, 8, 7, 6]])
    assert torch.equal(module(x, rows), x + module.weight[rows])


def test_gradient_is_zero_for_unused_rows():
    module = LearnedPositions(max_len=7).build(d_model=3)
    module(torch.zeros(2, 3, 3), torch.tensor([1, 4, 4])).sum().backward()
    assert module.weight.grad[:, 0].tolist() == [0, 2, 0, 0, 4, 0, 0]


def test_grid_with_extra_rows_has_expected_sizes():
    choice = LearnedPositions(grid=(3, 5), n_extra=2)
    assert (choice.length, choice.n_positions) == (17, 15)
    module = choice.build(d_model=7)
    x = torch.randn(2, 17, 7)
    assert torch.equal(module(x), x + module.weight)


def test_defaults_round_trip_through_a_dict(unchecked):
    from dataclasses import asdict

    assert LearnedPositions() == LearnedPositions(max_len=512)
    for choice in (LearnedPositions(), LearnedPositions(max_len=7, n_extra=1), LearnedPositions(grid=(3, 5))):
        assert LearnedPositions(**asdict(choice)) == choice
    assert LearnedPositions(grid=[3, 5]) == LearnedPositions(grid=(3, 5))
    assert hash(LearnedPositions(grid=[3, 5])) == hash(LearnedPositions(grid=(3, 5)))


def test_initial_table_has_small_standard_deviation():
    torch.manual_seed(0)
    weight = LearnedPositions(max_len=401).build(d_model=101).weight
    n = weight.numel()
    assert abs(weight.std().item() / 0.02 - 1) < 5 / math.sqrt(2 * n)
    assert abs(weight.mean().item()) < 5 * 0.02 / math.sqrt(n)


# ------------------------------------------------------------------------------------------------- refusals


def test_position_beyond_the_table_raises_and_suggests_resized():
    module = LearnedPositions(max_len=11).build(d_model=3)
    with pytest.raises(ShapeError, match=r"a sequence of 13 tokens, but .* has 11 rows .*`\.resized\(new_length\)`"):
        module(torch.zeros(2, 13, 3))
    with pytest.raises(ShapeError, match=r"position 11, but .* 11 rows \(0 … 10\)"):
        module(torch.zeros(2, 2, 3), torch.tensor([10, 11]))
    with pytest.raises(ShapeError, match="position -1, but"):
        module(torch.zeros(2, 2, 3), torch.tensor([-1, 0]))
    with pytest.raises(ShapeError, match=r"`\.resized\(\(rows, columns\)\)`"):
        LearnedPositions(grid=(2, 3)).build(3)(torch.zeros(7, 3))


def test_module_with_wrong_shape_or_dtype_raises(unchecked):
    module = LearnedPositions(max_len=11).build(d_model=3)
    with pytest.raises(ShapeError, match=r"x has shape \(2, 5, 7\); expected \(…, T, 3\)"):
        module(torch.zeros(2, 5, 7))
    with pytest.raises(ShapeError, match=r"positions have shape \(4,\)"):
        module(torch.zeros(2, 5, 3), torch.arange(4))
    with pytest.raises(DtypeError, match=r"positions are torch.float32; expected whole numbers"):
        module(torch.zeros(2, 5, 3), torch.arange(5.0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_len": 0}, "max_len is 0; expected a whole number of at least 1"),
        ({"max_len": 7, "grid": (2, 3)}, r"max_len is 7 and grid is \(2, 3\); expected one of them"),
        ({"grid": (2, 3, 5)}, r"grid is \(2, 3, 5\); expected 2 values, each a whole number"),
        ({"grid": 5}, "grid is 5; expected 2 values, each a whole number"),
        ({"grid": (2, 0)}, r"grid is \(2, 0\); expected 2 values, each a whole number of at least 1"),
        ({"n_extra": -1}, "n_extra is -1; expected a whole number of at least 0"),
    ],
)
def test_learned_positions_with_invalid_values_raises(unchecked, fields, message):
    with pytest.raises(ConfigError, match=message):
        LearnedPositions(**fields)


def test_resized_with_wrong_kind_of_size_raises(unchecked):
    with pytest.raises(ShapeError, match=r"resized\(\(2, 3\)\): these positions are a sequence; expected one whole"):
        LearnedPositions(max_len=5).build(3).resized((2, 3))
    with pytest.raises(ShapeError, match=r"resized\(5\): these positions are a grid; expected \(rows, columns\)"):
        LearnedPositions(grid=(2, 3)).build(3).resized(5)
    with pytest.raises(ConfigError, match=r"expected 2 values, each a whole number"):
        LearnedPositions(grid=(2, 3)).build(3).resized((2, 3, 5))
    with pytest.raises(ConfigError, match="max_len is 0"):
        LearnedPositions(max_len=5).build(3).resized(0)


# -------------------------------------------------------------------------------------------------- resized


def centre(new: int, old_size: int, new_size: int) -> float:
    """Where the centre of new cell `new` lies among the old cells."""
    return (new + 0.5) * old_size / new_size - 0.5


def linear(values: list[float], size: int) -> list[float]:
    out = []
    for i in range(size):
        at = max(centre(i, len(values), size), 0.0)
        low = min(math.floor(at), len(values) - 1)
        high = min(low + 1, len(values) - 1)
        out.append(values[low] + (at - low) * (values[high] - values[low]))
    return out


def cubic(values: list[float], size: int) -> list[float]:
    """Cubic convolution (Keys, 1981) with a = −3/4, the ends repeated."""
    a = -0.75

    def kernel(t: float) -> float:
        t = abs(t)
        if t <= 1:
            return (a + 2) * t**3 - (a + 3) * t**2 + 1
        return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0

    out = []
    for i in range(size):
        at = centre(i, len(values), size)
        near = range(math.floor(at) - 1, math.floor(at) + 3)
        out.append(sum(kernel(at - n) * values[min(max(n, 0), len(values) - 1)] for n in near))
    return out


@pytest.mark.parametrize("size", [3, 7, 19])
def test_resized_sequence_is_interpolated_linearly(size):
    module = LearnedPositions(max_len=7, n_extra=2).build(d_model=3).double()
    new = module.resized(size)
    assert new.choice == LearnedPositions(max_len=size, n_extra=2)
    assert torch.equal(new.weight[:2], module.weight[:2])
    columns = [linear(column.tolist(), size) for column in module.weight[2:].T]
    torch.testing.assert_close(new.weight[2:], torch.tensor(columns, dtype=torch.float64).T, rtol=0, atol=1e-13)


@pytest.mark.parametrize("grid", [(2, 3), (11, 7), (3, 13)])
def test_resized_grid_is_interpolated_bicubically(grid):
    module = LearnedPositions(grid=(3, 5), n_extra=1).build(d_model=2).double()
    new = module.resized(grid)
    assert new.choice == LearnedPositions(grid=grid, n_extra=1)
    assert torch.equal(new.weight[:1], module.weight[:1])
    for m in range(2):
        field = module.weight[1:, m].unflatten(0, (3, 5)).tolist()
        wide = [cubic(row, grid[1]) for row in field]
        tall = [cubic(list(column), grid[0]) for column in zip(*wide, strict=True)]  # columns first
        expected = torch.tensor(tall, dtype=torch.float64).T.flatten()
        torch.testing.assert_close(new.weight[1:, m], expected, rtol=0, atol=1e-13)


def test_resized_grid_equals_timm():
    from timm.layers import resample_abs_pos_embed

    module = LearnedPositions(grid=(5, 5), n_extra=1).build(d_model=7)
    expected = resample_abs_pos_embed(
        module.weight.detach()[None],
        [3, 11],
        [5, 5],
        num_prefix_tokens=1,
        interpolation="bicubic",
        antialias=False,
    )
    torch.testing.assert_close(module.resized((3, 11)).weight, expected[0], rtol=0, atol=1e-7)


def test_resized_to_same_size_returns_a_copy():
    for module, size in (
        (LearnedPositions(max_len=7).build(3), 7),
        (LearnedPositions(grid=(2, 3), n_extra=1).build(3), (2, 3)),
    ):
        new = module.resized(size)
        assert torch.equal(new.weight, module.weight)
        assert new.weight.data_ptr() != module.weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_resized_keeps_dtype_and_requires_grad(dtype):
    module = LearnedPositions(grid=(2, 3)).build(5).to(dtype).eval()
    module.weight.requires_grad_(False)
    new = module.resized((3, 5))
    assert (new.weight.dtype, new.weight.requires_grad, new.training) == (dtype, False, False)


@pytest.mark.compiled
def test_learned_positions_compile_to_a_full_graph():
    module = LearnedPositions(max_len=29).build(d_model=6)
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for T, start in ((5, 0), (7, 13)):
        x, positions = torch.randn(2, T, 6), torch.arange(start, start + T)
        assert torch.equal(compiled(x, positions), module(x, positions))


def test_skipped_rows_precede_the_first_position():
    plain, moved = (
        LearnedPositions(max_len=7, n_extra=1).build(5),
        LearnedPositions(max_len=7, n_extra=1, skipped=2).build(5),
    )
    assert moved.weight.shape == (2 + 1 + 7, 5)
    with torch.no_grad():
        plain.weight.copy_(moved.weight[2:])
    x = torch.randn(2, 8, 5)
    assert torch.equal(moved(x), plain(x))
    places = torch.tensor([[0, 3, 7], [1, 1, 2]])
    assert torch.equal(moved(x[:, :3], places), plain(x[:, :3], places))
    longer = moved.resized(11)
    assert torch.equal(longer.weight[:3], moved.weight[:3])
    assert torch.equal(longer.weight[2:], plain.resized(11).weight)


@pytest.mark.bad_input
def test_skipped_rows_are_not_positions():
    with pytest.raises(ShapeError, match=r"position 7, but the table of learned positions has 7 rows \(0 … 6\)"):
        LearnedPositions(max_len=7, skipped=2).build(5)(torch.randn(1, 1, 5), torch.tensor([7]))
