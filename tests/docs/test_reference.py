"""The reference can be made: every public name has a docstring and an example, and every example runs and is right."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("library", ROOT / "docs" / "library.py")
library = importlib.util.module_from_spec(spec)
spec.loader.exec_module(library)


def exported(room: str) -> dict[str, object]:
    return {name: value for name, value in library.public(room).items() if callable(value)}


@pytest.mark.parametrize("room", library.ROOMS)
def test_every_public_name_and_member_has_a_docstring(room):
    silent = []
    for name, value in exported(room).items():
        silent += [name] if not inspect.getdoc(value) else []
        for member in library.members(value, {}) if inspect.isclass(value) else ():
            silent += [f"{name}.{member}"] if not library.doc_of(value, member) else []
    assert silent == []


@pytest.mark.parametrize("room", library.ROOMS)
def test_every_public_name_has_an_example(room):
    assert [name for name in exported(room) if not library.example_of(room, name)] == []


def check(block: str, names: dict[str, object]) -> None:
    """Run a block; an expression with `# → value` behind it must have that value."""
    lines = block.splitlines()
    for node in ast.parse(block).body:
        line = lines[(node.end_lineno or 1) - 1]
        _, wanted, value = line.partition("# → ")
        code = ast.unparse(node)
        if wanted and isinstance(node, ast.Expr):
            assert repr(eval(code, names)) == value.strip(), line
        else:
            exec(code, names)


@pytest.mark.parametrize("room", library.ROOMS)
def test_the_examples_run(room, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opening, blocks = library.examples(room)
    for block in blocks:
        names: dict[str, object] = {}
        check(opening, names)
        check(block, names)


def test_a_wrong_value_is_found():
    with pytest.raises(AssertionError):
        check("1 + 1  # → 3", {})


def test_every_json_has_its_shape():
    import typer

    from clearhead.cli.app import every_command, whole_app

    told = {}
    for words in every_command():
        command = typer.main.get_command(whole_app())
        for word in words:
            command = command.commands[word]
        told[" ".join(words)] = "json" in {parameter.name for parameter in command.params}
    assert sum(told.values()) > 25
    with_json = {name for name, has in told.items() if has and not name.startswith("bench ")}
    # What cannot be run on every machine: one needs a network, one a recording, two a model of other people's.
    assert with_json <= set(library.COMMANDS) | {"data fetch", "listen", "embed", "transcribe"}
    assert set(library.COMMANDS) <= set(told)
    assert library.shape({"a": [1, 2], "b": {"c": None}}) == "{\n  a: [whole number, …]\n  b: {\n    c: null\n  }\n}"
