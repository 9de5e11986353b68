"""Starter code: the solutions are right, and each typical mistake is explained."""

from __future__ import annotations

import json
import re
import sys
from importlib import resources

import pytest
import torch

from clearhead.attention import attend
from clearhead.cli.app import run as run_command
from clearhead.course.exercises.starter_code import grade_program, starter_code, starters
from clearhead.errors import ClearheadError
from clearhead.masks import allow
from clearhead.nn.positions import Sinusoidal
from clearhead.training.schedules import WarmupCosine

NAMES = sorted(starters())


def solution(name: str) -> str:
    return (resources.files("clearhead.course.exercises") / "starters" / f"{name}.txt").read_text(encoding="utf-8")


def by_heads(x, w_q, w_k, w_v, w_o, n_heads, mask=None):
    q, k, v = ((x @ w).unflatten(-1, (n_heads, -1)).transpose(0, 1)[None] for w in (w_q, w_k, w_v))
    return attend(q, k, v, None if mask is None else allow(mask))[0].transpose(0, 1).flatten(1) @ w_o


def by_texts(x, w_q, w_k, w_v, w_o, n_heads, lengths=None, causal=False, mask=None):
    """Attend text by text, head by head and query by query, to a list of allowed keys."""
    n_texts, n_tokens, width = x.shape
    out = torch.zeros_like(x)
    for b in range(n_texts):
        n_keys = n_tokens if lengths is None else int(lengths[b])
        for columns in torch.arange(width).chunk(n_heads):
            q, k, v = (x[b] @ w[:, columns] for w in (w_q, w_k, w_v))
            for i in range(n_tokens):
                keys = [j for j in range(n_keys) if (not causal or j <= i) and (mask is None or mask[i, j])]
                if keys:
                    weights = torch.softmax(k[keys] @ q[i] / len(columns) ** 0.5, 0)
                    out[b, i, columns] = weights @ v[keys]
    return out @ w_o


# The same functions by clearhead, torch or loops.
REFERENCES = {
    "multi-head-batch": by_texts,
    "multi-head": by_heads,
    "attention": lambda q, k, v, mask=None: attend(
        q[None, None], k[None, None], v[None, None], None if mask is None else allow(mask)
    )[0, 0],
    "layer-norm": lambda x, gamma, beta, eps=1e-5: torch.nn.functional.layer_norm(x, gamma.shape, gamma, beta, eps),
    "positions": lambda length, d_model: Sinusoidal().table(length, d_model, dtype=torch.float64),
    "schedule": lambda step, lr_max, warmup, total: WarmupCosine(lr_max, warmup, total)(step),
}


@pytest.mark.parametrize("name", NAMES)
def test_solution_matches_library_and_is_graded_right(name, tmp_path):
    namespace = {}
    exec(compile(solution(name), name, "exec"), namespace)
    function = re.findall(r"(?m)^def (\w+)", solution(name))[0]
    draw = torch.Generator().manual_seed(3)
    for case, arguments in namespace["cases"](lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)):
        actual, expected = namespace[function](*arguments), REFERENCES[name](*arguments)
        torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(expected), rtol=1e-12, atol=1e-12, msg=case)
    mine = tmp_path / "mine.py"
    mine.write_text(solution(name))
    assert grade_program(name, mine).is_right


@pytest.mark.parametrize("name", NAMES)
def test_printed_solution_is_graded_right(name, tmp_path, cli):
    mine = tmp_path / "mine.py"
    mine.write_text(cli("exercise", "starter", name, "--solution").out)
    assert "#~" not in mine.read_text()
    assert grade_program(name, mine).is_right


@pytest.mark.parametrize("name", NAMES)
def test_starter_code_contains_no_solution(name, tmp_path):
    text = starter_code(name)
    assert "#~" not in text
    assert "return" not in text
    mine = tmp_path / "mine.py"
    mine.write_text(text)
    graded = grade_program(name, mine)
    assert {wrong for _, wrong in graded.cases} == {"the function is not implemented yet"}
    assert not graded.because


@pytest.mark.parametrize("name", NAMES)
def test_each_mistake_of_starter_is_explained(name, tmp_path):
    """Replace the line above each mistake by the mistake."""
    lines, mine = solution(name).splitlines(), tmp_path / "mine.py"
    for i, line in enumerate(lines):
        match = re.match(r"(\s*)#~ (.*) :: (.*)", line)
        if match:
            at = max(n for n in range(i) if not lines[n].strip().startswith("#"))
            mine.write_text("\n".join([*lines[:at], match[1] + match[2], *lines[at + 1 :]]))
            graded = grade_program(name, mine)
            assert not graded.is_right, line
            assert graded.because == (match[3],), line


OTHER_CODE = """
import torch
import torch.nn.functional as F

def multi_head_attention(x, w_q, w_k, w_v, w_o, n_heads, mask=None):
    outputs = []
    width = x.shape[-1] // n_heads
    for h in range(n_heads):
        mine = slice(h * width, (h + 1) * width)
        q, k, v = x @ w_q[:, mine], x @ w_k[:, mine], x @ w_v[:, mine]
        s = q @ k.T / width ** 0.5
        if mask is not None:
            s = torch.where(mask, s, torch.tensor(float("-inf")))
        outputs.append(F.softmax(s, dim=1) @ v)
    return torch.cat(outputs, dim=1) @ w_o
"""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ((), []),
        ((" / width ** 0.5", ""), ["not scaled"]),
        (
            ('torch.where(mask, s, torch.tensor(float("-inf")))', 's.masked_fill(mask, -float("inf"))'),
            ["wrong way round"],
        ),
        (("dim=1) @ v", "dim=0) @ v"), ["wrong axis"]),
        (("dim=1) @ w_o", "dim=1)"), ["output projection is missing"]),
        ((" / width ** 0.5", "", "dim=1) @ w_o", "dim=1)"), ["not scaled", "output projection is missing"]),
        (("x @ w_v[:, mine]", "x @ w_v[:, mine] + 1"), []),
    ],
)
def test_grade_program_explains_mistakes_in_other_code(change, expected, tmp_path):
    """A loop over heads, as in pseudo-code: mistakes are recognized from the outputs alone."""
    text = OTHER_CODE
    for old, new in zip(change[::2], change[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    mine = tmp_path / "mine.py"
    mine.write_text(text)
    graded = grade_program("multi-head", mine)
    assert graded.is_right == (not change)
    assert len(graded.because) == len(expected)
    assert all(words in why for words, why in zip(expected, graded.because, strict=True))


SCHEDULE = """
import math


def schedule(step, lr_max, warmup, total):
    if step <= warmup:
        return lr_max * step / warmup
    return lr_max * math.cos(math.pi / 2 * (step - warmup) / (total - warmup)) ** 2
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("lr_max * step / warmup", "lr_max * (step + 1) / warmup"),
        ("(step - warmup) /", "(step - warmup + 1) /"),
        ("(total - warmup)", "(total - warmup + 1)"),
        ("return lr_max * math", "return 1e-5 + lr_max * math"),
    ],
    ids=["right", "early", "shifted", "slow", "raised"],
)
def test_grade_program_is_as_strict_for_small_outputs(old, new, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(SCHEDULE.replace(old, new) if old else SCHEDULE)
    assert grade_program("schedule", mine).is_right == (not old)


@pytest.mark.bad_input
def test_invalid_programs_raise(tmp_path):
    mine = tmp_path / "mine.py"
    for text, why in [
        ("def other(): pass", "has no function multi_head_attention"),
        ("def broken(:", "cannot be run: SyntaxError in line 1"),
        ("import no_such_module", "cannot be run: ModuleNotFoundError in line 1"),
        ("raise SystemExit(0)", "cannot be run: SystemExit in line 1"),
    ]:
        mine.write_text(text)
        with pytest.raises(ClearheadError, match=why):
            grade_program("multi-head", mine)
    with pytest.raises(ClearheadError, match=r"file .* does not exist"):
        grade_program("multi-head", tmp_path / "none.py")
    with pytest.raises(ClearheadError, match="multi-head"):
        starter_code("multihead")
    mine.write_text("def multi_head_attention(x, *rest):\n    y = 3\n    return x / y + rest[9]\n")
    graded = grade_program("multi-head", mine)
    assert all("IndexError in line 3" in wrong for _, wrong in graded.cases)
    mine.write_text("def multi_head_attention(x, *rest):\n    return x[:1]\n")
    assert "the output is (1, 6), expected (5, 6)" in str(grade_program("multi-head", mine))
    mine.write_text("def multi_head_attention(x, *rest):\n    return None\n")
    assert not grade_program("multi-head", mine).is_right
    mine.write_text("def multi_head_attention(x, *rest):\n    exit(0)\n")
    assert "SystemExit" in str(grade_program("multi-head", mine))
    mine.write_text("def multi_head_attention(x, *rest):\n    return x + 1j\n")
    assert "the output is complex, expected real numbers" in str(grade_program("multi-head", mine))


@pytest.mark.bad_input
def test_grade_says_that_free_text_is_not_graded(tmp_path, cli):
    for arguments in (["ceng403-exam", "mine.toml"], ["multi-head", "essay.md"]):
        message = cli("exercise", "grade", *arguments).err
        assert "free text, which is not graded" in message
        assert "clearhead course show" in message


def test_starter_and_grade_commands(tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["clearhead", "exercise", *map(str, arguments)])
        with pytest.raises(SystemExit) as ending:
            run_command()
        return int(ending.value.code or 0), capsys.readouterr().out

    assert all(name in run("starter")[1] for name in NAMES)
    assert run("starter", "attention")[1] == starter_code("attention")
    mine = tmp_path / "mine.py"
    mine.write_text(OTHER_CODE.replace(" / width ** 0.5", ""))
    status, out = run("grade", "multi-head", mine)
    assert status == 1
    assert "The scores are not scaled" in out
    assert json.loads(run("grade", "multi-head", mine, "--json")[1])["because"]
    mine.write_text(OTHER_CODE)
    status, out = run("grade", "multi-head", mine)
    assert (status, out.splitlines()[-1]) == (0, "5 of 5 cases right")
