"""Read the given values of a worksheet, and write answers like a student with a calculator."""

from __future__ import annotations

import json
import math

import torch


def inputs_of(sheet):
    """Return the given values of a worksheet by name: numbers, matrices, words."""
    inputs = {}
    for step in sheet.steps:
        if step.is_given:
            cells = step.grid.cells
            if step.key == "given":
                inputs |= {row: line[0] for row, line in zip(step.grid.rows, cells, strict=True)}
            else:
                inputs[step.key] = torch.tensor([[float(x) for x in line] for line in cells], dtype=torch.float64)
    numbers = {
        k: float(x) if not isinstance(x, str) and x.is_number else x
        for k, x in inputs.items()
        if not torch.is_tensor(x)
    }
    inputs |= numbers
    if sheet.kind == "receptive-field":
        inputs |= {name: sheet.problem[name] for name in ("heads", "layers", "tokens")}
    if "also" in sheet.problem:
        inputs["also"] = sheet.problem["also"]
    return inputs


def to_answer(answer):
    """As a student writes it, who has a calculator: whole numbers whole, others with six digits."""
    if torch.is_tensor(answer):
        answer = answer.tolist()
    if isinstance(answer, list | tuple):
        return f"[{', '.join(map(to_answer, answer))}]"
    if isinstance(answer, str):
        return json.dumps(answer)
    near = answer == 0 or (0.5 < abs(answer) < math.inf and abs(answer - round(answer)) < 1e-12)
    return f"{answer:.0f}" if near else f"{answer:.6g}"
