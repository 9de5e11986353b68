"""The templates of problem files can be worked, and the reference says what the kinds take."""

from __future__ import annotations

import re
import tomllib

import pytest

from clearhead.errors import ClearheadError
from clearhead.work import ProblemError, grade_text, solve, solve_text
from clearhead.work.kinds import PROBLEM_TYPES
from clearhead.work.problem import COMMON
from clearhead.work.schema import schema, template, write_template

# Keys that stand in the place of others.
INSTEAD = [("attention", "x"), ("attention", "Q"), ("attention", "K"), ("attention", "V"), ("derivation", "model")]


@pytest.mark.parametrize("kind", PROBLEM_TYPES)
def test_each_template_works_as_it_is_and_with_every_key(kind):
    work = solve_text(template(kind))
    assert work.kind == kind
    assert work.agrees
    assert work.title == "My problem"
    instead = [key for kind_, key in INSTEAD if kind_ == kind]
    lines = [x for x in template(kind).splitlines() if not any(x.startswith(f"#{key} = ") for key in instead)]
    whole = re.sub(r"(?m)^#(?=\S)", "", "\n".join(lines))  # with all its keys in force
    assert set(tomllib.loads(whole)) == {*COMMON, *PROBLEM_TYPES[kind].keys} - set(instead)
    full = solve_text(whole)
    assert full.agrees
    assert len(full.comparisons) == 1
    wrong = next(step for step in full.steps if step.key == tomllib.loads(whole)["mistake"][0]["step"])
    if wrong.grid.is_scalar:
        assert "added a row twice" in str(grade_text(full, f"{wrong.key} = 99"))


@pytest.mark.parametrize("kind", PROBLEM_TYPES)
def test_the_reference_says_which_keys_are_needed(kind):
    about, keys = schema(kind)
    assert about
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


def test_a_file_with_every_kind_works_and_is_written_once(tmp_path):
    path = tmp_path / "my.toml"
    write_template(path)
    assert solve(path).kind == next(iter(PROBLEM_TYPES))
    for kind in PROBLEM_TYPES:
        assert f'kind = "{kind}"' in path.read_text()
    others = path.read_text().partition("# Other kinds")[2]
    for block in re.split(r"(?m)^(?=## # .*\n## kind = )", others)[1:]:
        assert solve_text(re.sub(r"(?m)^## ?", "", block)).agrees


@pytest.mark.bad_input
def test_what_is_not_written(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("mine")
    for where, kind, why in [
        (path, None, "already exists"),
        (tmp_path / "my.txt", None, "expected a name ending in .toml"),
        (tmp_path / "no" / "my.toml", None, "cannot be written"),
        (tmp_path / "new.toml", "attentoin", "attention"),
    ]:
        with pytest.raises(ClearheadError, match=why):
            write_template(where, kind)
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]
