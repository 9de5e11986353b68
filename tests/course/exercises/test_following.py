"""Credit for steps that follow from a wrong step, explained mistakes, and grades of a class."""

from __future__ import annotations

import json
import sys

import pytest

from clearhead.cli.app import run as run_command
from clearhead.course.exercises import ProblemError, grade_class, grade_file, grade_text, solve, solve_text
from clearhead.course.exercises.common_errors import apply_mistake, common_errors
from clearhead.course.exercises.grading_rules import follows, numeric_columns
from clearhead.course.exercises.numbers import read_number, text
from clearhead.course.exercises.problem import solve_again

SOFTMAX = """
kind = "attention"
x = [[1, 0], [1, 1], [0, 2]]
mask = "causal()"
vocabulary = ["a", "b"]
[weights]
Q = [[1, 0], [0, 1]]
K = [[1, 1], [0, 1]]
V = [[1, 2], [3, 1]]
U = [[1, 0], [0, 1]]
[[loss]]
targets = { 1 = "b", 2 = "a" }
"""


NO_MASK = SOFTMAX.replace('mask = "causal()"', "").replace('{ 1 = "b", 2 = "a" }', '{ 2 = "b", 3 = "a" }')


def marks_of(step):
    return [mark for row in step.marks for mark in row]


def answers(**steps) -> str:
    """TOML of steps whose cells are exact numbers or texts."""
    bounded_text = {
        k: [[x if isinstance(x, str) else text(x) for x in row] for row in rows] for k, rows in steps.items()
    }
    return "\n".join(f"{key} = {json.dumps(rows, ensure_ascii=False)}" for key, rows in bounded_text.items())


def test_step_that_follows_from_wrong_step_gets_credit():
    """By hand: with 7 in place of 21/4 the entries are (x − 7/2)/√7, times 3/2 and 1/2 more."""
    norm = solve("layer-norm-identity")
    marks = grade_text(
        norm, 'variance = 7\nz = [-0.945, "-3/2/sqrt(7)", 0.189, 1.5]\ny = [-0.917, -0.350, 0.783, 2.484]'
    )
    variance, z, y = marks.steps
    assert marks_of(variance) == ["wrong"]
    assert marks_of(z) == ["follows", "follows", "follows", "wrong"]
    assert marks_of(y) == ["follows"] * 3 + ["wrong"], (
        "the last follows from the z of 7, not from the 1.5 that was written"
    )
    assert not marks.is_right, "credit is not a right answer"
    assert (z.right, z.credit, marks.credit) == (0, 3, 6)
    y = grade_text(norm, "variance = 7\nz = [-0.945, -0.567, 0.189, 1.5]\ny = [-0.917, -0.350, 0.783, 2.75]").steps[2]
    assert marks_of(y) == ["follows"] * 4, "3/2·1.5 + 1/2"


def test_follows_requires_three_places_and_other_result():
    assert follows("0.9454", read_number("5/2/sqrt(7)"))
    assert not follows("0.946", read_number("5/2/sqrt(7)"))
    step = grade_text(
        solve("sort-dedup"),
        'r = [[0,3,0,3],[3,0,3,0],[3,0,3,0],[1.5,0.75,1.5,0.75],[3,0,3,1],[0,3,0,3],["9/7","6/7","9/7",0.8572]]',
    ).steps[0]
    assert [m for m in marks_of(step) if m != "right"] == ["wrong", "wrong"], "a different rounding is not a wrong step"


def test_missing_mask_is_explained_once_and_later_steps_follow():
    work = solve_text(SOFTMAX, "small.toml")
    mistaken = solve_again(work, {"mask": "full()"})
    student_answers = {key: mistaken.step(key).grid.cells for key in ("weights", "z", "logits", "loss")}
    marks = grade_text(work, answers(**student_answers))
    weights, *after = marks.steps
    assert "mask was left out" in weights.because
    assert set(marks_of(weights)) == {"right", "wrong"}
    assert all("wrong" not in marks_of(step) and step.credit == step.cells for step in after)
    assert not any(step.because for step in after)
    last_step = grade_text(work, answers(loss=student_answers["loss"])).steps[0]
    assert "mask was left out" in last_step.because, "recognized from the last step alone"


def test_loss_of_unshifted_targets_is_explained():
    (step,) = grade_text(solve("sort-dedup"), "loss = 4.2114").steps
    assert step.because.startswith("This is the loss of each row's own token")


@pytest.mark.parametrize(
    ("name", "answer", "explanation"),
    [
        ("layer-norm-identity", "z = [-0.4762, -0.2857, 0.0952, 0.6667]", "it is its root"),
        ("layer-norm-identity", 'length = "-3"', "The sign is wrong"),
        ("layer-norm-identity", "z = [-1.1, -0.65, 0.22, 1.53]", "Correct except for rounding"),
        ("sinusoid-position-3", "encoding = [[-0.98999, 0.14112, 0, 0]]", ""),
        ("sinusoid-position-3", "encoding = [[0.0523, 0.9986, 0.0505, 0.9987]]", "in degrees"),
        ("cnn-digits", "weights = [200, 0, 2048, 0, 0, 1440]", "The biases are missing"),
        ("cnn-digits", "shapes = [[1,32,32],[8,28,28],[8,7,7],[16,4,4],[16,2,2],[64,1,1],[10,1,1]]", "padding"),
        ("attention-1000-512", "operations_total = 2072576000", "counted as one operation"),
        ("attention-1000-512", "parameters_total = 786432", "output projection is missing"),
        ("sparse-16", "allowed = 122", "another reading"),
        ("sparse-16", 'saving = "15/32"', "not what is saved"),
        ("receptive-field", 'formula = ["1", "2^n", "3^n", "8^n"]', "residual connection was left out"),
        ("schedule", "fraction = [0, 0.00025, 0.5, 1, 0.16, 0.24, 0.32, 0.48, 0.72, 0.96]", "lasts total − warmup"),
        ("attention-by-hand", "weights = [[0.5, 0.5, 0], [0.5, 0, 0.5]]", ""),
        ("sort-dedup", "grad_V = 0", ""),
        ("sort-dedup", "r = [[3,0,3,0],[0,3,0,3],[0,3,0,3],[0.75,1.5,0.75,1.5],[0,3,0,3],[3,0,3,0],[0,0,0,0]]", ""),
    ],
)
def test_explain_names_known_mistakes_only(name, answer, explanation):
    (step,) = grade_text(solve(name), answer).steps
    assert not step.is_right
    assert explanation in step.because if explanation else step.because == ""


def test_mistake_of_problem_file_is_explained():
    mistake = '\n[[mistake]]\nstep = "logits"\nsays = [[1, 1], [2, 2], [3, 3]]\nwhy = "You added the rows."\n'
    work = solve_text(SOFTMAX + mistake)
    assert grade_text(work, "logits = [[1, 1], [2, 2], [3, 3]]").steps[0].because == "You added the rows."


def test_every_common_error_changes_some_problem():
    """The explanation of a mistake without any effect would never be printed."""
    names = "cnn-digits layer-norm-identity sinusoid-position-3 sparse-16 schedule receptive-field attention-1000-512"
    small = [SOFTMAX, SOFTMAX + 'reduction = "mean"', SOFTMAX.replace("mask =", "heads = 2\nmask ="), NO_MASK]
    works = [*map(solve_text, small), *map(solve, names.split())]
    for kind in {work.kind for work in works}:
        for mistake in common_errors(kind):
            assert any(_shows(work, mistake) for work in works if work.kind == kind), mistake


def _shows(work, mistake):
    """Return whether a mistake changes a step of a problem, searching from the last step."""
    questions = [step for step in reversed(work.steps) if not step.is_given]
    if apply_mistake(work, mistake, questions[0].key) is None:
        return False
    return any(
        apply_mistake(work, mistake, step.key) != [list(row) for row in numeric_columns(step).cells]
        for step in questions
    )


def test_answers_without_continuation_are_graded_wrong():
    norm = solve("layer-norm-identity")
    marks = grade_text(norm, "centered = [0, 0, 0, 0]\nvariance = 0\nz = [1, 1, 1, 1]")
    assert marks_of(marks.steps[2]) == ["wrong"] * 4
    attention = solve_text(SOFTMAX)
    assert marks_of(grade_text(attention, "targets_loss = [-1, 0]\nloss = 3").steps[1]) == ["wrong"]


# ---------------------------------------------------------------------- answer files, and a class


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clearhead", "exercise", *map(str, arguments)])
        with pytest.raises(SystemExit) as ending:
            run_command()
        captured = capsys.readouterr()
        return int(ending.value.code or 0), captured.out, captured.err

    return call


def test_answers_in_toml_json_csv_and_sheet_get_same_grades(tmp_path, run):
    norm = solve("layer-norm-identity")
    sheet = json.loads(run("solve", "layer-norm-identity", "--questions-only", "--json")[1])
    for step in sheet["steps"]:
        if step["key"] in ("mean", "z"):
            step["exact"] = {"mean": [["7/2"]], "z": [["-5/sqrt(21)", "-3/sqrt(21)", "0.2182", ""]]}[step["key"]]
    files = {
        "a.toml": 'mean = 3.5\nz = ["-5/sqrt(21)", "-3/sqrt(21)", 0.2182, ""]',
        "b.json": '{"mean": 3.5, "z": ["-5/sqrt(21)", "-3/sqrt(21)", 0.2182, ""]}',
        "c.csv": "step,answer\nmean,3.5\nz,-5/sqrt(21),-3/sqrt(21),0.2182,,\n",
        "d.json": json.dumps(sheet | {"student": "Dora"}),
    }
    grades = {}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        grades[name] = grade_file(norm, tmp_path / name)
    for name, marks in grades.items():
        assert [step.key for step in marks.steps] == ["mean", "z"], name
        assert marks_of(marks.steps[0]) == ["right"], name
        assert marks_of(marks.steps[1])[:3] == ["right"] * 3, name
    assert [m.student for m in grades.values()] == ["a", "b", "c", "Dora"]


def test_grade_class_lists_students_mistakes_and_unread_files(tmp_path, run):
    (tmp_path / "ada.toml").write_text("mean = 3.5\nvariance = 7\n")
    (tmp_path / "bob.json").write_text('{"mean": 3.5, "variance": 5.25}')
    (tmp_path / "all.csv").write_text(
        "student,step\ncyd,mean,4\ncyd,centered,-3,-2,0,3\ndan,mean,3.5\ndan,variance,7\n\n"
    )
    (tmp_path / "eve.toml").write_text("mean = [\n")
    names = sorted(path for path in tmp_path.iterdir())
    marks = grade_class(solve("layer-norm-identity"), names)
    assert {m.student: m.credit for m in marks.students} == {"ada": 1, "bob": 2, "cyd": 4, "dan": 1}
    assert [(n, key) for n, key, _ in marks.mistakes] == [(2, "variance")]
    assert [name for name, _ in marks.unread] == ["eve.toml"]
    for arguments in (names, [tmp_path]):
        status, out, _ = run("grade", "layer-norm-identity", *arguments)
        assert status == 1
        assert "2 students, variance: The variance was divided by d − 1" in out
        assert "not graded: eve.toml" in out
    document = json.loads(run("grade", "layer-norm-identity", tmp_path, "--json")[1])
    assert [s["student"] for s in document["students"]] == ["ada", "cyd", "dan", "bob"]
    assert document["unread"][0]["file"] == "eve.toml"


@pytest.mark.bad_input
def test_invalid_answer_files_raise(tmp_path, run):
    norm = solve("layer-norm-identity")
    for name, content, why in [
        ("a.json", "{", "line 1: this is not JSON"),
        ("b.json", "[1]", "expected an object of steps"),
        ("c.json", '{"zz": 1}', "c.json: the key 'zz' is unknown here"),
        ("e.csv", "student,step\na,mean,1\nb,mean,2", "answers of 2 students"),
    ]:
        (tmp_path / name).write_text(content)
        with pytest.raises(ProblemError, match=why):
            grade_file(norm, tmp_path / name)
    status, out, error = run("grade", "layer-norm-identity", tmp_path / "c.json")
    assert (status, out) == (1, "")
    assert "c.json: the key 'zz' is unknown" in error
    (tmp_path / "none").mkdir()
    assert "has no answer files" in run("grade", "layer-norm-identity", tmp_path / "none")[2]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", "centered,,what,1/2,7/2"), ("a.toml", 'centered = ["", "what", 0.5, "7/2"]')]
)
def test_cell_that_is_not_a_number_is_named_and_the_others_are_graded(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    grades = grade_file(solve("layer-norm-identity"), tmp_path / name)
    assert grades.steps[0].marks == (("blank", "unreadable", "right", "right"),)
    assert grades.credit == 2
    assert not grades.is_right
    assert "got what, which is not a number, expected −3/2" in str(grades)


def test_infinity_of_wrong_sign_is_graded_and_explained():
    """A student's ∞ where −∞ belongs is a number like any other: wrong, and nothing need follow from it."""
    work = solve("sort-dedup")
    (masked_step,) = (step for step in work.steps if step.key == "masked")
    rows = [[text(-x) for x in row] for row in masked_step.grid.cells]
    marks = grade_text(work, f"masked = {json.dumps(rows)}")
    assert marks.steps[0].because == "The sign is wrong: these are the right numbers times −1."
