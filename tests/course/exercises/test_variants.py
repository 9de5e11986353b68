"""Variants of exercises with other numbers; `make variants` runs 100 seeds of each, these tests a few."""

from __future__ import annotations

import re
import tomllib
from decimal import Decimal

import pytest

from clearhead.course.exercises import Problem, ProblemError, bundled_problems, grade_text, read, solve, variant
from clearhead.course.exercises.random_values import RandomValues
from clearhead.errors import ConfigError
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
def test_variant_has_no_faults(name):
    assert faults(name, range(7, 8)) == []


def test_variant_of_encoder_decoder_has_no_faults():
    assert faults("encoder-decoder", range(7, 8)) == []


def test_variant_with_same_seed_is_equal():
    first, again, other = variant("layer-norm-identity", 5), variant("layer-norm-identity", 5), variant("schedule", 105)
    assert first == again
    assert first.name == "layer-norm-identity-seed-5"
    assert solve(first).steps == solve(again).steps
    assert other.text != variant("schedule", 5).text, "seeds above 100 give separate worksheets"


def test_variants_of_an_exercise_with_few_draws_exist_for_every_seed_and_differ():
    # The seeds from 100 to 199 share 159 draws. Those of the seeds 166 and 167 are unsuitable, that of 168 is not.
    assert faults("sparse-16", range(166, 169)) == []


def test_variant_names_its_seed_and_omits_document_comparisons():
    work = solve(variant("sort-dedup", 3))
    assert work.source.endswith("questions 2, 3 and 5, with other numbers (seed 3)")
    assert not work.comparisons
    assert " ".join(read(variant("sort-dedup", 3)).source.names("tokens")) in work.question
    assert "{" not in work.question + work.title


def test_variant_of_two_heads_has_the_numbers_of_one_head():
    for seed in (None, 3, 107):
        single_head, two_heads = (
            solve(read(name) if seed is None else variant(name, seed))
            for name in ("sort-dedup", "sort-dedup-two-heads")
        )
        assert single_head.step("z").grid.cells == two_heads.step("z1").grid.cells == two_heads.step("z2").grid.cells
        assert single_head.step("z").grid.rows == two_heads.step("z1").grid.rows
        labels = [worksheet.step("targets_loss").grid.rows for worksheet in (single_head, two_heads)]
        assert labels[0] == labels[1]


def test_variant_preserves_equality_and_order():
    for seed in range(4):
        values = tomllib.loads(variant("sort-dedup-two-heads", seed).text)
        weights = values["weights"]
        assert weights["Q"] == weights["K"] == weights["V"]
        assert all(row[:2] == row[2:] for row in weights["Q"]), "two equal heads"
        assert weights["O"] == [[int(i == j) for j in range(4)] for i in range(4)]
        after = [token for token in values["tokens"][4:] if not token.startswith("<")]
        assert after == sorted(set(values["tokens"][:3]))


def test_variant_of_hard_attention_ties_equal_words_only():
    def attended(work):
        weights = work.step("weights").grid
        words = [name.split()[-1] for name in weights.columns]
        return [len({word for word, p in zip(words, row, strict=True) if p != 0}) for row in weights.cells]

    assert attended(solve("sort-dedup")) == [1, 1, 1, 3, 1, 1, 4]
    for seed in range(6):
        assert attended(solve(variant("sort-dedup", seed))) == [1, 1, 1, 3, 1, 1, 4]
        values = tomllib.loads(variant("sort-dedup", seed).text)
        assert values["weights"]["O"] == [[0, 1, 0, 1], [1, 0, 1, 0]], "named by keep"


def test_variant_of_user_file_has_other_numbers(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('kind = "attention"\nQ = [[1, 2], [0, 1]]\nK = [[1, 0], [2, 1], [0, 1]]\nV = [["1/2"], [3], [1]]\n')
    changed = variant(path, 2)
    assert changed.name == "mine-seed-2"
    assert solve(changed).source == "With other numbers (seed 2)"
    assert tomllib.loads(changed.text)["V"] != [["1/2"], [3], [1]]
    assert variant(read(path), 2) == changed


@pytest.mark.bad_input
def test_invalid_seed_or_fixed_problem_raises():
    with pytest.raises(ConfigError, match="seed is -1; expected a whole number of at least 0"):
        variant("schedule", -1)
    with pytest.raises(ConfigError, match="seed is 'seven'"):
        variant("schedule", "seven")
    fixed = Problem(
        "fixed", 'kind = "derivation"\n[given]\na = 1\n[vary]\na = "keep"\n[[step]]\nkey = "b"\nis = "a + 1"\n'
    )
    with pytest.raises(ProblemError, match="fixed has no variant of its difficulty for seed 0"):
        variant(fixed, 0)


def test_similar_keeps_size_and_denominators():
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


def test_wrong_answer_of_variant_is_graded_wrong():
    """The check of variants can fail: one digit, one cell."""
    work = solve(variant("layer-norm-identity", 1))
    right = answers(work)
    assert grade_text(work, right).is_right
    mean = str(work.step("mean").grid.cells[0][0] + 1)
    assert not grade_text(work, right + "\n").unanswered
    wrong = "\n".join(f'mean = [["{mean}"]]' if line.startswith("mean") else line for line in right.splitlines())
    assert not grade_text(work, wrong).is_right


@pytest.mark.parametrize("name", ["sparse-16", "masks-by-architecture", "layer-norm-identity", "convolution-128"])
def test_variants_ask_for_about_as_many_numbers(name):
    def cells(work):
        return sum(len(step.grid.numbers) for step in work.steps if not step.is_given)

    original = cells(solve(name))
    assert all(original / 2 <= cells(solve(variant(name, seed))) <= original * 2 for seed in range(6))


@pytest.mark.parametrize("name", ["cnn-digits", "convolution-128"])
@pytest.mark.parametrize("seed", range(4))
def test_variant_of_convolutions_rounds_no_size_and_keeps_strides(name, seed):
    work = solve(variant(name, seed))
    *_, high, wide = work.problem["input"]
    for layer in work.problem["layer"]:
        if "kernel" in layer:
            kernel, padding = layer["kernel"], layer.get("padding", 0)
            stride = layer.get("stride", 1)
            pairs = [x if isinstance(x, list) else [x, x] for x in (kernel, stride, padding)]
            after = [(n + 2 * p - k) / s + 1 for n, k, s, p in zip((high, wide), *pairs, strict=True)]
            assert all(size.is_integer() for size in after)
            high, wide = map(int, after)
    if name == "convolution-128":
        assert work.problem["layer"][0]["stride"][1] > 1


def test_variant_of_a_schedule_has_a_decimal_rate():
    for seed in range(3):
        assert re.search(r"lr_max = 0\.0+[1-9],", solve(variant("schedule", seed)).question)
