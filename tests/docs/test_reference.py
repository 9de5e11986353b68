"""Every public name has a docstring and an example, and every example runs and returns the documented value."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("api_reference", ROOT / "docs" / "api_reference.py")
api_reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(api_reference)


def exported(package: str) -> dict[str, object]:
    return {name: value for name, value in api_reference.public(package).items() if callable(value)}


@pytest.mark.parametrize("package", api_reference.PACKAGES)
def test_every_public_name_and_member_has_a_docstring(package):
    undocumented = []
    for name, value in exported(package).items():
        undocumented += [name] if not inspect.getdoc(value) else []
        for member in api_reference.members(value, {}) if inspect.isclass(value) else ():
            undocumented += [f"{name}.{member}"] if not api_reference.doc_of(value, member) else []
    assert undocumented == []


@pytest.mark.parametrize("package", api_reference.PACKAGES)
def test_every_public_name_has_an_example(package):
    assert [name for name in exported(package) if not api_reference.example_of(package, name)] == []


@pytest.mark.parametrize("package", api_reference.PACKAGES)
def test_source_link_points_to_the_definition(package):
    for name, value in exported(package).items():
        if not (inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value))):
            continue
        (link,) = api_reference._source(value)
        path, line = re.search(r"\[(\S+), line (\d+)\]", link).groups()
        assert "__" not in path, "Markdown would render it as bold"
        lines = (ROOT / path.replace("\\_", "_")).read_text(encoding="utf-8").splitlines()[int(line) - 1 :]
        definition = next(text for text in lines if not text.startswith(("@", " ", ")")))
        assert re.match(rf"(class|def) {value.__name__}\b", definition), name
        assert api_reference._summary(value), name


def test_package_index_lists_every_package_and_the_names_of_clearhead():
    name, text = api_reference.package_index()
    assert name == "packages"
    for package in api_reference.PACKAGES:
        assert f"[`clearhead.{package}`](api-{package.replace('.', '-')}.md)" in text
    assert "[`attend`](api-attention.md#name-attention-attend)" in text
    assert "[`MultiHeadAttention`](api-nn.md#class-nn-multiheadattention)" in text


@pytest.mark.parametrize("package", api_reference.PACKAGES)
def test_entries_contain_no_addresses_and_no_folders_of_this_machine(package):
    for name, value in api_reference.public(package).items():
        if inspect.ismodule(value):
            continue
        entry = "\n".join(api_reference._entry(package, name, value))
        assert not re.search(r" at 0x[0-9a-f]+|<lambda>|= …|ForwardRef|type: ignore", entry), name
        assert str(ROOT) not in entry, name
        if callable(value) and "```" in entry:
            code = re.search(r"````python\n(.*?)````", entry, re.DOTALL)[1]
            assert max(map(len, code.splitlines())) <= 160, name


def test_prose_renders_examples_as_one_block_of_code():
    text = "Sum.\n\nExample:\n    import a\n\n    a.b(1)\n\nMore words."
    assert api_reference.prose(text) == "Sum.\n\n**Example**\n\n````python\nimport a\n\na.b(1)\n````\n\nMore words."


def test_prose_removes_prompts_only_from_sessions_without_output():
    assert api_reference.prose("Example:\n    >>> f(1)\n    >>> f(2)") == "**Example**\n\n````python\nf(1)\nf(2)\n````"
    assert api_reference.prose(">>> f(1)\n2") == "````pycon\n>>> f(1)\n2\n````"


def test_help_marks_options_as_code_only_outside_of_code():
    text = "For `clearhead train text --data SHARDS`; --out and `--json` too."
    assert api_reference._help(text) == "For `clearhead train text --data SHARDS`; `--out` and `--json` too."


def test_prose_joins_the_lines_of_an_entry_of_a_section():
    text = "Args:\n    ids: Ids. A\n    negative id is none.\n    *rest: Others."
    assert api_reference.prose(text) == "**Args**\n\n- `ids`: Ids. A negative id is none.\n- `*rest`: Others."
    assert api_reference.prose("Returns:\n    Ids,\n    and scores.") == "**Returns**\n\n- Ids, and scores."


def test_entry_of_a_long_constant_ends_with_a_whole_name():
    from clearhead.hub.checkpoint import FAMILIES

    *names, last = "".join(api_reference._entry("hub.checkpoint", "FAMILIES", FAMILIES)).split("`")[-2].split()
    assert last == "…"
    assert {name.strip("[,'") for name in names} <= set(FAMILIES)


def test_page_of_a_command_group_lists_its_subcommands(monkeypatch):
    monkeypatch.setattr(api_reference, "COMMANDS", {})  # no example is run
    pages = dict(api_reference.commands())
    assert "[`clearhead claims show`](command-claims-show.md)" in pages["command-claims"]
    assert "[`clearhead plot run`](command-plot-run.md)" in pages["command-plot"]
    assert "clearhead claims show`](" not in pages["command-claims-run"]


@pytest.fixture
def crosslinks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("crosslinks")


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("ch.attend", ("reference/api-attention", "name-attention-attend")),
        ("MultiHeadAttention(8, 2, rotary=Rotary())", ("reference/api-nn", "class-nn-multiheadattention")),
        ("window(2, 2)", ("reference/api-masks", "name-masks-window")),
        ("analysis.trace", ("reference/api-analysis", "name-analysis-trace")),
        ("clearhead exercise solve NAME --seed 7", ("reference/command-exercise-solve", "")),
        ("clearhead train", ("reference/command-train", "")),
    ],
)
def test_inline_code_refers_to_its_entry(text, target, crosslinks):
    assert crosslinks.target(text) == target


@pytest.mark.parametrize("text", ["padding", "causal() & window(2, 0)", "nn.Linear", "x", "clearhead", "make docs"])
def test_inline_code_without_an_entry_is_not_linked(text, crosslinks):
    assert crosslinks.target(text) is None


def test_bare_word_is_linked_if_a_cell_uses_the_function(crosslinks):
    source = "```{code-cell} python\nfrom clearhead.masks import padding\n\nch.attend(q, k, v, padding([3]))\n```\n"
    names = crosslinks.names_in_cells(source)
    assert names == ["attend", "padding"]
    assert crosslinks.target("padding", frozenset(names)) == ("reference/api-masks", "name-masks-padding")


def check(block: str, names: dict[str, object]) -> None:
    """Run a block; compare expressions with the value that follows in `# → value`."""
    lines = block.splitlines()
    for node in ast.parse(block).body:
        line = lines[(node.end_lineno or 1) - 1]
        _, arrow, value = line.partition("# → ")
        code = ast.unparse(node)
        if arrow and isinstance(node, ast.Expr):
            assert repr(eval(code, names)) == value.strip(), line
        else:
            exec(code, names)


@pytest.mark.parametrize("package", api_reference.PACKAGES)
def test_examples_run(package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opening, blocks = api_reference.examples(package)
    for block in blocks:
        names: dict[str, object] = {}
        check(opening, names)
        check(block, names)


def test_check_with_a_wrong_value_raises():
    with pytest.raises(AssertionError):
        check("1 + 1  # → 3", {})


def test_reference_describes_the_json_of_every_command():
    import typer

    from clearhead.cli.app import every_command, whole_app

    has_json = {}
    for words in every_command():
        command = typer.main.get_command(whole_app())
        for word in words:
            command = command.commands[word]
        has_json[" ".join(words)] = "json" in {parameter.name for parameter in command.params}
    assert sum(has_json.values()) > 25
    with_json = {name for name, has in has_json.items() if has}
    # These need a network, a recording, or a third-party model or checkpoint.
    assert with_json <= set(api_reference.COMMANDS) | {"data fetch", "listen", "embed", "transcribe", "convert"}
    assert set(api_reference.COMMANDS) <= set(has_json)
    expected = "{\n  a: [whole number, …]\n  b: {\n    c: null\n  }\n}"
    assert api_reference.shape({"a": [1, 2], "b": {"c": None}}) == expected
