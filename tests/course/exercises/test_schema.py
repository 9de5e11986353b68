"""Templates of problem files can be solved, and the schema lists the keys of each type."""

from __future__ import annotations

import re
import tomllib

import pytest

from clearhead.course.exercises import ProblemError, grade_text, solve, solve_text
from clearhead.course.exercises.problem import COMMON
from clearhead.course.exercises.problem_types import PROBLEM_TYPES
from clearhead.course.exercises.schema import schema, template, write_template
from clearhead.errors import ClearheadError

# Keys that replace other keys.
ALTERNATIVES = [("attention", "x"), ("attention", "Q"), ("attention", "K"), ("attention", "V"), ("derivation", "model")]


@pytest.mark.parametrize("kind", PROBLEM_TYPES)
def test_template_solves_as_written_and_with_every_key(kind):
    work = solve_text(template(kind))
    assert work.kind == kind
    assert work.agrees
    assert work.title == "My problem"
    alternatives = [key for kind_, key in ALTERNATIVES if kind_ == kind]
    lines = [x for x in template(kind).splitlines() if not any(x.startswith(f"#{key} = ") for key in alternatives)]
    uncommented = re.sub(r"(?m)^#(?=\S)", "", "\n".join(lines))  # all optional keys are set
    assert set(tomllib.loads(uncommented)) == {*COMMON, *PROBLEM_TYPES[kind].keys} - set(alternatives)
    full = solve_text(uncommented)
    assert full.agrees
    assert len(full.comparisons) == 1
    wrong = next(step for step in full.steps if step.key == tomllib.loads(uncommented)["mistake"][0]["step"])
    if wrong.grid.is_scalar:
        assert "added a row twice" in str(grade_text(full, f"{wrong.key} = 99"))


@pytest.mark.parametrize("kind", PROBLEM_TYPES)
def test_schema_lists_required_keys(kind):
    description, keys = schema(kind)
    assert description
    assert [key.name for key in keys] == list(PROBLEM_TYPES[kind].keys)
    values = tomllib.loads(template(kind))
    for key in keys:
        assert key.description, key.name
        assert key.description[0].isupper() or key.description[0] == '"'
        if key.optional:
            continue
        written = template(kind)
        written = re.sub(rf"(?m)^{key.name} = .*\n", "", written)
        written = re.sub(rf"(?ms)^\[+{key.name}\]+\n.*?(?=^\[|^#|\Z)", "", written)
        assert key.name not in tomllib.loads(written)
        with pytest.raises(ProblemError):
            solve_text(written)
    assert {key.name for key in keys if not key.optional} <= set(values)
    assert [key.name for key in schema()[1]] == list(COMMON)


def test_x_in_place_of_tokens_and_q_k_v_in_place_of_all():
    values = re.sub(r"(?m)^tokens = .*\n", "", template("attention"))
    start, weights = values.index("# A vector for each token"), values.index("# Q, K and V have")
    assert solve_text((values[:start] + values[weights:]).replace("#x = ", "x = ")).step("x").is_given
    direct = re.sub(r"(?m)^#(?=[QKV] = )", "", values[:start])
    assert solve_text(direct).step("q").is_given


def test_template_of_all_types_solves_each_type(tmp_path):
    path = tmp_path / "my.toml"
    write_template(path)
    assert solve(path).kind == next(iter(PROBLEM_TYPES))
    for kind in PROBLEM_TYPES:
        assert f'kind = "{kind}"' in path.read_text()
    other_types = path.read_text().partition("# Other kinds")[2]
    for block in re.split(r"(?m)^(?=## # .*\n## kind = )", other_types)[1:]:
        assert solve_text(re.sub(r"(?m)^## ?", "", block)).agrees


@pytest.mark.bad_input
def test_write_template_rejects_invalid_paths_and_types(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("mine")
    for target, kind, why in [
        (path, None, "already exists"),
        (tmp_path / "my.txt", None, "expected a name ending in .toml"),
        (tmp_path / "no" / "my.toml", None, "cannot be written"),
        (tmp_path / "new.toml", "attentoin", "attention"),
    ]:
        with pytest.raises(ClearheadError, match=why):
            write_template(target, kind)
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]
