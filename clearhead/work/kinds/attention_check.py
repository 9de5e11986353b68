"""The same attention problem through `attend` in float64, with autograd for the gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.attention import attend
from clearhead.attention.scores import Dot
from clearhead.attention.weights import Softmax
from clearhead.work.algebra import tensor
from clearhead.work.kinds.attention_setting import Setting
from clearhead.work.kinds.base import difference
from clearhead.work.numbers import as_float
from clearhead.work.sheet import Check, Step


def float64_checks(setting: Setting, steps: list[Step]) -> tuple[Check, ...]:
    """How far `attend` is from the exact weights, outputs, logits, losses and gradients."""
    found = _run(setting)
    apart = {step.key: difference(step.grid.cells, found[step.key]) for step in steps if step.key in found}
    checks = [Check("attend in float64", max(apart.values()))]
    gradients = [worst for key, worst in apart.items() if key.startswith("grad_")]
    if gradients:
        checks.append(Check("autograd through attend in float64", max(gradients)))
    return tuple(checks)


def _run(setting: Setting) -> dict[str, Tensor]:
    x, source = tensor(setting.x), tensor(setting.source)
    weights = {name: tensor(matrix).requires_grad_() for name, matrix in setting.weights.items()}
    H = setting.heads
    q, k, v = (
        (rows @ weights[name]).unflatten(-1, (H, -1)).transpose(0, 1)[None]  # (1, H, T or S, D)
        for name, rows in (("Q", x), ("K", source), ("V", source))
    )
    how = Softmax(temperature=as_float(setting.temperature))
    # The weights are what attend makes of values that are the identity.
    eye = torch.eye(source.shape[0], dtype=x.dtype).expand(1, H, -1, -1)
    p = attend(q, k, eye, setting.mask, scores=Dot(), weights=how)[0]
    z = attend(q, k, v, setting.mask, scores=Dot(), weights=how)[0]
    joined = z.transpose(0, 1).flatten(1)
    r = joined @ weights["O"] if "O" in weights else joined
    found = {"concat": joined, "r": r}
    for h in range(H):
        name = f"{h + 1}" if H > 1 else ""
        found |= {f"q{name}": q[0, h], f"weights{name}": p[h], f"z{name}": z[h]}
    if "U" not in weights:
        return found
    logits = found["logits"] = r @ weights["U"]
    for i, loss in enumerate(setting.losses):
        rows = torch.tensor(list(loss.targets))
        words = torch.tensor([setting.vocabulary.index(word) for word in loss.targets.values()])
        value = torch.nn.functional.cross_entropy(logits[rows], words, reduction="mean" if loss.mean else "sum")
        found[f"probabilities_{loss.name}"] = logits[rows].softmax(-1)
        found[loss.name] = value.reshape(1, 1)
        if i == 0 and setting.gradients:
            wanted = {"logits": logits} | {name: weights[name] for name in setting.gradients}
            made = torch.autograd.grad(
                value, list(wanted.values()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            found |= {f"grad_{name}": gradient for name, gradient in zip(wanted, made, strict=True)}
    return found
