"""Variants: the same exercise with other numbers. `make variants` runs a hundred seeds of every sheet; here a few."""

from __future__ import annotations

import tomllib
from decimal import Decimal

import pytest

from clearhead.errors import ConfigError
from clearhead.work import Problem, ProblemError, bundled_problems, grade_text, read, solve, variant
from clearhead.work.draw import RandomValues
from tools.variants import answers, faults

# About a second each: one seed of one of them is tried here, and all of them by `make variants`.
SLOW = (
    "encoder-decoder",
    "encoder-decoder-softmax",
    "layer-norm-batch-norm",
    "perturb-key-query",
    "sort-dedup-softmax",
)


@pytest.mark.parametrize("name", [name for name in bundled_problems() if name not in SLOW])
def test_variants_are_worked_checked_and_marked_right(name):
    assert faults(name, range(7, 8)) == []


def test_a_variant_of_a_whole_encoder_decoder():
    assert faults("encoder-decoder", range(7, 8)) == []


def test_the_same_seed_is_the_same_sheet_and_another_is_not():
    first, again, other = variant("layer-norm-identity", 5), variant("layer-norm-identity", 5), variant("schedule", 105)
    assert first == again
    assert first.name == "layer-norm-identity-seed-5"
    assert solve(first).steps == solve(again).steps
    assert other.text != variant("schedule", 5).text, "a seed beyond the first hundred is a sheet of its own"


def test_a_variant_says_so_and_leaves_out_what_a_document_printed():
    work = solve(variant("sort-dedup", 3))
    assert work.source.endswith("questions 2, 3 and 5, with other numbers (seed 3)")
    assert not work.comparisons
    assert " ".join(read(variant("sort-dedup", 3)).source.names("tokens")) in work.question
    assert "{" not in work.question + work.title


def test_what_is_equal_stays_equal_and_what_is_sorted_stays_sorted():
    for seed in range(4):
        values = tomllib.loads(variant("sort-dedup-two-heads", seed).text)
        weights = values["weights"]
        assert weights["Q"] == weights["K"] == weights["V"]
        assert all(row[:2] == row[2:] for row in weights["Q"]), "two equal heads"
        assert weights["O"] == [[int(i == j) for j in range(4)] for i in range(4)]
        after = [token for token in values["tokens"][4:] if not token.startswith("<")]
        assert after == sorted(set(values["tokens"][:3]))


def test_a_file_of_ones_own_varies(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('kind = "attention"\nQ = [[1, 2], [0, 1]]\nK = [[1, 0], [2, 1], [0, 1]]\nV = [["1/2"], [3], [1]]\n')
    made = variant(path, 2)
    assert made.name == "mine-seed-2"
    assert solve(made).source == "With other numbers (seed 2)"
    assert tomllib.loads(made.text)["V"] != [["1/2"], [3], [1]]
    assert variant(read(path), 2) == made


@pytest.mark.bad_input
def test_what_cannot_vary_is_refused():
    with pytest.raises(ConfigError, match="seed is -1; expected a whole number of at least 0"):
        variant("schedule", -1)
    with pytest.raises(ConfigError, match="seed is 'seven'"):
        variant("schedule", "seven")
    fixed = Problem(
        "fixed", 'kind = "derivation"\n[given]\na = 1\n[vary]\na = "keep"\n[[step]]\nkey = "b"\nis = "a + 1"\n'
    )
    with pytest.raises(ProblemError, match="fixed has no variant of its difficulty for seed 0"):
        variant(fixed, 0)


def test_draws_stay_as_small_as_what_they_replace():
    fractions, integers = set(), set()
    for seed in range(200):
        rng = RandomValues(str(seed))
        matrix = rng.similar([[0, 3], [1, "1/2"]])
        integers |= {matrix[0][0], matrix[0][1], matrix[1][0]}
        fractions.add(matrix[1][1])
        assert rng.similar([[0, 1], [1, 0]]) == [[0, 1], [1, 0]], "a permutation stays"
        assert sorted(cell for row in rng.similar([[0, 1, 1], [1, 0, 0]]) for cell in row) == [0, 0, 0, 1, 1, 1]
        assert rng.similar(-2) < 0
        assert rng.similar("sqrt(2)") == "sqrt(2)"
        assert 0 < rng.similar(Decimal("0.5") * 2) <= 3
    assert integers == {0, 1, 2, 3}
    assert fractions == {"1/2", "3/2", "5/2"}


def test_answers_that_are_wrong_are_not_marked_right():
    """The check of variants can fail: one digit, one cell."""
    work = solve(variant("layer-norm-identity", 1))
    right = answers(work)
    assert grade_text(work, right).is_right
    mean = str(work.step("mean").grid.cells[0][0] + 1)
    assert not grade_text(work, right + "\n").unanswered
    wrong = "\n".join(f'mean = [["{mean}"]]' if line.startswith("mean") else line for line in right.splitlines())
    assert not grade_text(work, wrong).is_right
