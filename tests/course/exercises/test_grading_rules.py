"""Grading of single cells."""

from __future__ import annotations

import pytest

from clearhead.course.exercises import ProblemError, grade_text, solve


@pytest.fixture(scope="module")
def work():
    return solve("sort-dedup")


def test_fractions_decimals_and_expressions_are_graded_right(work):
    marks = grade_text(
        work,
        'z = [[3, 0], [0, 3], [0.0, "3"], [0.75, "3/2"], [0, 3], [3, 0], ["6/7", 1.2857]]\n'
        'targets_loss_own = ["e^3/(2*e^3+4)", 0.4547, "1/(2*exp(9/7) + 2*exp(6/7) + 2)"]\n'
        "loss_own = 4.2114\n",
    )
    assert marks.is_right
    assert [step.right for step in marks.steps] == [14, 3, 1]
    assert "weights" in marks.unanswered
    assert "E" not in marks.unanswered, "given values are not questions"


def test_each_cell_is_graded_separately(work):
    marks = grade_text(work, 'z = [[3, 0], [0, 3], [0, 2], [0.75, "1.5"], ["", 3], [3, 0], ["6/7", 1.2858]]\n')
    assert not marks.is_right
    (step,) = marks.steps
    wrong = {(i, j): m for i, row in enumerate(step.marks) for j, m in enumerate(row) if m != "right"}
    assert wrong == {(2, 1): "wrong", (4, 0): "blank", (6, 1): "wrong"}
    assert step.right == 11
    text = str(marks)
    assert "z: 11 of 14 right" in text
    assert "(3 A, z2) got 2, expected 3" in text
    assert "(5 A, z1) left blank, expected 0" in text
    assert "expected 9/7 ≈ 1.2857" in text
    assert marks.to_dict()["steps"][0]["marks"][2] == ["right", "wrong"]


def test_answer_of_wrong_shape_is_graded_on_shared_cells(work):
    marks = grade_text(work, "z = [[3, 0], [0, 3]]\nloss = [1, 2]\n")
    assert not marks.is_right
    assert marks.steps[0].problem == "the answer is 2×2, expected 7×2"
    assert marks.steps[0].right == 4
    assert marks.steps[0].cells == 14
    assert marks.steps[1].problem


def test_small_numbers_need_three_significant_places():
    schedule = solve("schedule")
    (step,) = grade_text(schedule, "rate = [0, 0.00000025, 0.001, 0.001, 0.001, 0.000, 0, 0, 0, 0]").steps
    right = [mark for row in step.marks for mark in row]
    assert right == ["right", "right", "wrong", "right", *["wrong"] * 5, "right"]
    (step,) = grade_text(
        schedule, "rate = [0, 2.5e-7, 0.0005, 1e-3, 0.000933, 8.54e-4, 0.00075, '1/2000', 0.000146, 0.0]"
    ).steps
    assert step.is_right


@pytest.mark.bad_input
def test_text_that_is_not_a_number_is_unreadable_and_never_evaluated(work):
    (step,) = grade_text(work, 'z = [[3, "0*1"], [0, "import os"], ["__import__", true]]').steps
    assert [list(row) for row in step.marks] == [["right", "right"], ["right", "unreadable"], ["unreadable"] * 2]


def test_empty_answers_are_not_right(work):
    assert not grade_text(work, "").is_right


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("answers", "line", "why"),
    [
        ("z = [[3, 0]]\nzz = 1\n", 2, "the key 'zz' is unknown"),
        ("E = [[1]]\n", 1, "the key 'E' is unknown"),
        ("z = [[3, 0]\n", 2, "not TOML"),
    ],
)
def test_unreadable_answer_file_raises(work, answers, line, why):
    with pytest.raises(ProblemError, match=why) as caught:
        grade_text(work, answers)
    assert caught.value.line == line
    assert str(caught.value).startswith(f"answers.toml, line {line}: ")
