"""Each named pattern compared with a predicate written from the definition of its paper."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch

from clearhead.errors import MaskError
from clearhead.masks import Mask, catalogue, parse


def prefix_lm(p, j):
    return j < 5 or j <= p


def sliding_window(p, j):
    return 0 <= p - j < 4


def sliding_window_with_sinks(p, j):
    return j <= p and (p - j < 4 or j < 2)


def dilated_window(p, j):
    return any(j == p + 3 * k for k in (-2, -1, 0, 1, 2))


def longformer(p, j):
    return abs(p - j) <= 3 or p in (0, 1) or j in (0, 1)


def sparse_transformer_strided(p, j):
    """Head one sees the previous 5 locations, head two every 5th one."""
    return p >= j and (p - j < 5 or (p - j) % 5 == 0)


def sparse_transformer_fixed(p, j):
    """The same block of 5, or the last 2 positions of any earlier block."""
    return p >= j and (p // 5 == j // 5 or j % 5 in (3, 4))


def block_causal(p, j):
    return j // 6 <= p // 6


def block_diffusion(p, j):
    """x_t of 12 tokens and then x_0, in blocks of 4: block-diagonal, offset block-causal and block-causal parts."""
    noisy_p, noisy_j = p < 12, j < 12
    block_p, block_j = p % 12 // 4, j % 12 // 4
    if noisy_p and noisy_j:
        return block_p == block_j
    if noisy_p:
        return block_p > block_j
    return not noisy_j and block_p >= block_j


def shared_prefix(p, j):
    ends = (4, 9, 16, 24)
    piece_p, piece_j = (next(i for i, end in enumerate(ends) if x < end) for x in (p, j))
    return j <= p and (piece_j == 0 or piece_j == piece_p)


def neighborhood(p, j):
    """NATTEN on 4 × 6 with windows of 3: the window is moved inside the image."""
    (y, x), (v, u) = divmod(p, 6), divmod(j, 6)
    top, left = min(max(y - 1, 0), 4 - 3), min(max(x - 1, 0), 6 - 3)
    return top <= v < top + 3 and left <= u < left + 3


def _in_tile_order(p):
    """Return the row and column of position p of a 4 × 6 image stored in tiles of 2 × 3, by enumerating all pixels."""
    order = [
        (2 * tile_y + y, 3 * tile_x + x)
        for tile_y in range(2)
        for tile_x in range(2)
        for y in range(2)
        for x in range(3)
    ]
    return order[p]


def tiled_neighborhood(p, j):
    (y, x), (v, u) = _in_tile_order(p), _in_tile_order(j)
    return neighborhood(y * 6 + x, v * 6 + u)


def local_windows(p, j):
    (y, x), (v, u) = divmod(p, 6), divmod(j, 6)
    return (y // 2, x // 2) == (v // 2, u // 2)


def axial(p, j):
    return p // 6 == j // 6 or p % 6 == j % 6


def sliding_tile(p, j):
    """Tiles of 1 × 2 on an image of 4 × 6 see 3 × 3 tiles, of which there are 4 × 3."""
    tiles = [(row, column) for row in range(4) for column in range(3) for _ in range(2)]
    (row, _), (key_row, _) = tiles[p], tiles[j]
    top = min(max(row - 1, 0), 4 - 3)
    return top <= key_row < top + 3  # and every column of tiles, as there are three


def frame_causal(p, j):
    return j // 8 <= p // 8


CASES = {
    "prefix_lm": (catalogue.prefix_lm(5), prefix_lm),
    "sliding_window": (catalogue.sliding_window(4), sliding_window),
    "sliding_window_with_sinks": (catalogue.sliding_window_with_sinks(4, 2), sliding_window_with_sinks),
    "dilated_window": (catalogue.dilated_window(6, 3), dilated_window),
    "longformer": (catalogue.longformer(3, 2), longformer),
    "sparse_transformer_strided": (catalogue.sparse_transformer_strided(5), sparse_transformer_strided),
    "sparse_transformer_fixed": (catalogue.sparse_transformer_fixed(5, 2), sparse_transformer_fixed),
    "block_causal": (catalogue.block_causal(6), block_causal),
    "block_diffusion": (catalogue.block_diffusion(12, 4), block_diffusion),
    "shared_prefix": (catalogue.shared_prefix(4, [5, 7, 8]), shared_prefix),
    "neighborhood": (catalogue.neighborhood((4, 6), 3), neighborhood),
    "tiled neighborhood": (catalogue.neighborhood((4, 6), 3, tile=(2, 3)), tiled_neighborhood),
    "local_windows": (catalogue.local_windows((4, 6), 2), local_windows),
    "axial": (catalogue.axial((4, 6)), axial),
    "sliding_tile": (catalogue.sliding_tile((4, 6), 3, (1, 2)), sliding_tile),
    "frame_causal": (catalogue.frame_causal(8), frame_causal),
}
OTHERS = {"bigbird", "native_sparse_attention", "flamingo"}  # tested below
N = 24


@pytest.mark.parametrize("name", CASES)
def test_pattern_matches_its_definition(name):
    mask, predicate = CASES[name]
    expected = torch.tensor([[predicate(p, j) for j in range(N)] for p in range(N)])
    assert torch.equal(mask.dense(N), expected)
    assert mask.count(N) == int(expected.sum())
    if mask.is_structural:
        assert parse(mask.to_text()) == mask


def test_every_pattern_of_the_catalogue_is_compared_with_a_definition():
    functions = {
        name
        for name, value in vars(catalogue).items()
        if inspect.isfunction(value) and value.__module__ == catalogue.__name__ and not name.startswith("_")
    }
    assert functions == {name for name in CASES if " " not in name} | OTHERS


def test_bigbird_adds_random_keys_to_longformer():
    dense, base = catalogue.bigbird(3, 2, 4, seed=1).dense(N), catalogue.longformer(3, 2).dense(N)
    assert bool((dense | ~base).all())
    added = (dense & ~base).sum(1)
    assert int(added.max()) <= 4
    assert int(added.sum()) > 0


def test_native_sparse_attention_sees_selected_blocks_and_the_last_keys():
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 6, (2, 3, N, 2), generator=generator)
    dense = catalogue.native_sparse_attention(blocks, size=4, reach=2).dense(N)
    for b, h, p, j in itertools.product(range(2), range(3), range(N), range(N)):
        expected = j <= p and (j // 4 in blocks[b, h, p].tolist() or p - j <= 2)
        assert bool(dense[b, h, p, j]) == expected


def test_flamingo_text_sees_its_last_image():
    tokens = ["text", "image", "text", "text", "image", "text"]
    images = list(itertools.accumulate(token == "image" for token in tokens))
    mask = catalogue.flamingo(torch.tensor([[n - 1 for n in images]]), keys_per_image=3)
    dense = mask.dense(6, 6)
    for i, j in itertools.product(range(6), range(6)):
        image_of_key = 1 + j // 3
        assert bool(dense[0, 0, i, j]) == (image_of_key == images[i])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: catalogue.neighborhood((4, 4), 2), "the side of neighborhood is 2; expected an odd number"),
        (lambda: catalogue.sliding_tile((4, 6), 3, (2, 4)), r"the tile of sliding_tile is \(2, 4\); expected divisors"),
        (
            lambda: catalogue.block_diffusion(10, 4),
            "the length of block_diffusion is 10; expected a multiple of its size",
        ),
        (lambda: catalogue.sparse_transformer_fixed(4, 5), "is 5; expected at most its stride, 4"),
        (lambda: catalogue.sliding_window(0), "the size of sliding_window is 0"),
        (lambda: catalogue.neighborhood((), 3), "the grid of axis has 0 dimensions; expected 1 to 8"),
        (lambda: catalogue.axial(()), "the grid of axis has 0 dimensions; expected 1 to 8"),
        (lambda: catalogue.sliding_tile((4, 4), 3, (0, 4)), r"the tile of sliding_tile is \(0, 4\); expected divisors"),
        (lambda: catalogue.shared_prefix(3, [-1]), "the n of shared_prefix and each of its lengths is -1; expected"),
        (lambda: catalogue.flamingo(torch.zeros(3).long(), 0), "the keys_per_image of flamingo is 0; expected"),
    ],
)
def test_invalid_pattern_raises_one_sentence(build, message):
    with pytest.raises(MaskError, match=message):
        build()


def test_pattern_prints_as_documented():
    assert isinstance(catalogue.axial((4, 6)), Mask)
    line = next(line for line in catalogue.__doc__.splitlines() if "print(" in line)
    code, expected = line.strip().removeprefix("print(").split(")  # ")
    assert str(eval(code, {"catalogue": catalogue})) == expected
