"""Questions 5 and 6: causal masks, residual connections, and other forms of attention."""

from __future__ import annotations

from clearhead.course.answers.content import AnswerFigure, AnswerTable


def causal_mask() -> AnswerFigure:
    """Return the causal mask of the target."""
    from clearhead import masks

    return masks.draw(masks.causal(), 8)


def residual_layers() -> int:
    """Return the depth of the example."""
    return 12


def residual_blocks() -> int:
    """Return the number of blocks of the exercise."""
    from clearhead.course.exercises import solve

    grid = solve("residual-gradient").step("given").grid
    return int(grid.cells[grid.rows.index("L")][0])


def plain_gradient() -> str:
    """Return f^L for f = 1/2."""
    digits, power = f"{0.5 ** residual_layers():.1e}".split("e")
    return f"{digits}·10^{{−{abs(int(power))}}}"


def sparse_pattern() -> AnswerFigure:
    """Return the sparse pattern."""
    from clearhead import masks

    return masks.draw(masks.window(2, 2) | masks.every(4), 16)


def _pairs(name: str) -> int:
    from clearhead import masks

    band, columns = masks.window(2, 2), masks.every(4)
    return int({"band": band, "columns": columns, "both": band & columns, "any": band | columns}[name].count(16))


def band_pairs() -> int:
    """Return the pairs of the band."""
    return _pairs("band")


def column_pairs() -> int:
    """Return the pairs of the columns."""
    return _pairs("columns")


def overlap_pairs() -> int:
    """Return the pairs that are in the band and in a column."""
    return _pairs("both")


def sparse_pairs() -> int:
    """Return the pairs of the pattern."""
    return _pairs("any")


def sparse_density() -> str:
    """Return the density of the pattern."""
    return f"{sparse_pairs() / 256:.1%}".replace("%", " %")


def sparse_saving() -> str:
    """Return the saving of the pattern."""
    return f"{1 - sparse_pairs() / 256:.1%}".replace("%", " %")


def sparse_layers() -> int:
    """Return the number of layers of the pattern after which every token depends on every other."""
    from clearhead import masks

    pattern = (masks.window(2, 2) | masks.every(4)).dense(16).float()
    reach, layers = pattern, 1
    while not reach.bool().all():
        reach, layers = pattern @ reach, layers + 1
    return layers


def sparse_far_tokens() -> str:
    """Return the tokens that some token does not depend on after two layers of the pattern."""
    from clearhead import masks

    pattern = (masks.window(2, 2) | masks.every(4)).dense(16).float()
    is_far = ((pattern @ pattern) == 0).any(0)
    return ", ".join(str(token) for token in is_far.nonzero().flatten().tolist())


def sparse_growth() -> AnswerTable:
    """Return pairs per token of the window and of the pattern, by length."""
    from clearhead import masks

    band, pattern = masks.window(2, 2), masks.window(2, 2) | masks.every(4)
    rows = [
        [f"{n:,}", f"{band.count(n) / n:.2f}", f"{pattern.count(n) / n:,.1f}", f"{1 - pattern.count(n) / n**2:.1%}"]
        for n in (16, 256, 4096, 65_536)
    ]
    header = ["n", "pairs per token, window", "pairs per token, pattern", "saving of the pattern"]
    return AnswerTable(header, [[n, a, b, saving.replace("%", " %")] for n, a, b, saving in rows])


_LONG, _WINDOW = 4096, 128


def window_length() -> int:
    """Return the length of the example of a window."""
    return _LONG


def window_width() -> int:
    """Return the number of keys in the window."""
    return _WINDOW + 1


def window_pairs() -> int:
    """Return the pairs of the window."""
    from clearhead import masks

    return int(masks.window(_WINDOW // 2, _WINDOW // 2).count(_LONG))


def full_pairs() -> int:
    """Return all pairs."""
    return _LONG**2


def window_factor() -> str:
    """Return by how much the window reduces the pairs."""
    return f"{full_pairs() / window_pairs():.1f}"


def window_reach() -> AnswerTable:
    """Return how many of 64 tokens the first output depends on, by the number of layers of windows."""
    from clearhead import masks

    pattern = masks.window(2, 2).dense(64).float()
    rows = []
    for layers in (1, 2, 4, 8, 16, 32):
        reached = int(pattern.matrix_power(layers)[0].bool().sum())
        rows.append([layers, reached, 64])
    caption = "Number of tokens, of 64, that the output at the first token depends on."
    return AnswerTable(["layers", "windows of ±2", "full attention"], rows, caption)


def score_forms() -> AnswerTable:
    """Return how far the two scores are from being linear in the query, and their parameters."""
    import torch

    from clearhead.attention import Additive, Dot

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, rows, 8, generator=generator, dtype=torch.float64) for rows in (3, 5))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        additive = Additive(8, 8, 8).double()
    rows: list[list[str | int | float]] = []
    for name, score in (("dot product", Dot()), ("additive, d_a = 8", additive)):
        with torch.no_grad():
            bent = (score(2 * q, k) - 2 * score(q, k)).abs().max().item()
        parameters = sum(p.numel() for p in score.parameters()) if isinstance(score, torch.nn.Module) else 0
        rows.append([name, f"{bent:.2g}", parameters])
    caption = "The dot product is linear in the query; the additive score, with random parameters, is not."
    return AnswerTable(["score", "largest |s(2q, k) − 2·s(q, k)|", "parameters"], rows, caption)


def additive_width() -> int:
    """Return the width of the additive score of the example."""
    return 64


def additive_parameters() -> int:
    """Return the parameters of an additive score."""
    width = additive_width()
    return 2 * width * width + width
