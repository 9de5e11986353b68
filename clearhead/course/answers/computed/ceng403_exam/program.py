"""Question 3: the multi-head program."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from clearhead.course.answers.content import AnswerTable

if TYPE_CHECKING:
    from torch import Tensor


@lru_cache(maxsize=1)
def _multi_head_leaks() -> tuple[float, float, float]:
    """Return the largest changes of outputs by padding, by later tokens under the mask, and without the mask."""
    import torch

    from clearhead.course.exercises.starter_code import solution_code

    namespace: dict[str, object] = {}
    exec(compile(solution_code("multi-head-batch"), "solution", "exec"), namespace)  # bundled text
    attend = namespace["multi_head_attention"]
    assert callable(attend)
    generator = torch.Generator().manual_seed(0)
    x, *weights = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((1, 5, 6), *[(6, 6)] * 4)
    )
    other = x.clone()
    other[0, -1] += 1.0  # the last token
    lengths = torch.tensor([4])

    def change(first: int, **options: object) -> float:
        difference: Tensor = attend(x, *weights, 3, **options) - attend(other, *weights, 3, **options)
        return difference[0, :first].abs().max().item()

    return change(4, lengths=lengths), change(4, causal=True), change(1)


def padding_leak() -> str:
    """Return the largest change of real tokens' outputs if padding changes."""
    return f"{_multi_head_leaks()[0]:g}"


def causal_leak() -> str:
    """Return the largest change of earlier outputs if the last token changes, under the causal mask."""
    return f"{_multi_head_leaks()[1]:g}"


def unmasked_leak() -> float:
    """Return the change of the first output if the last token changes, without a causal mask."""
    return _multi_head_leaks()[2]


def multi_head_shapes() -> AnswerTable:
    """Return the shapes in the program, for a batch of 2 texts of 10 tokens, width 512 and 8 heads."""
    B, T, M, H = 2, 10, 512, 8
    rows: list[tuple[str, str, tuple[int, ...]]] = [
        ("x, q, k, v before the split", "(B, T, M)", (B, T, M)),
        ("q, k, v after the split", "(B, H, T, M/H)", (B, H, T, M // H)),
        ("scores and weights", "(B, H, T, T)", (B, H, T, T)),
        ("heads' outputs", "(B, H, T, M/H)", (B, H, T, M // H)),
        ("side by side, and output", "(B, T, M)", (B, T, M)),
    ]
    header = ["tensor", "shape", f"B = {B}, T = {T}, M = {M}, H = {H}"]
    return AnswerTable(header, [[name, shape, str(sizes)] for name, shape, sizes in rows])
