"""The reference, made from the code when the site is built: every public name, field, command, file and JSON document.

`rooms()` reads the packages themselves, `files()` the schemas by which TOML is read, `commands()` the help and what
each command really prints. An example is a block of `reference/examples/ROOM.py`, shown under every name that it uses;
`tests/docs/test_reference.py` runs them, and holds that no public name is without a docstring.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import os
import re
import shlex
import sys
import tempfile
import textwrap
import typing
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

if typing.TYPE_CHECKING:
    from sphinx.application import Sphinx  # needed by the build alone, not by the tests

HERE = Path(__file__).parent
OUT = HERE / "reference"
EXAMPLES = OUT / "examples"
RESULTS = HERE / "results"

ROOMS = (
    "errors",
    "audio",
    "masks",
    "positions",
    "attention",
    "layers",
    "models",
    "data",
    "training",
    "generation",
    "interop",
)
ROOMS += ("pretrained", "look", "work", "costs", "checks", "claims", "documents")

# Each command once as a person would type it, in this order; it is run, and again with --json where that is known.
COMMANDS = {
    "translate": "translate 'Hello world'",
    "train": "train --list",
    "evaluate": "evaluate sort-dedup --limit 50",
    "generate": "generate ROMEO: --max-new-tokens 20",
    "inspect": "inspect sort-dedup 'D A A'",
    "walk": "walk sort-dedup 'D A'",
    "exercise list": "exercise list",
    "exercise solve": "exercise solve attention-by-hand",
    "exercise grade": "exercise grade layer-norm-identity {folder}/answers.toml",
    "exercise starter": "exercise starter layer-norm",
    "exercise schema": "exercise schema layer-norm",
    "exam": "exam --from ceng403-exam --seed 7 --out {folder}/exam.pdf",
    "mask": "mask 'causal() & (window(3, 0) | every(4))' --n 12",
    "cost": "cost tiny-decoder --tokens 32",
    "check": "check sort-dedup --only 'causality'",
    "claims run": "claims run scale-key-weight",
    "claims show": "claims show scale-key-weight",
    "claims coverage": "claims coverage",
    "claims quiz": "claims quiz -n 1",
    "course list": "course list",
    "course show": "course show ceng403-answered",
    "models": "models",
    "data": "data",
    "train-tokenizer": "train-tokenizer {folder}/book.txt --out {folder}/tokenizer --vocab-size 300",
    "data tokenize": "data tokenize {folder}/book.txt --tokenizer {folder}/tokenizer --out {folder}/shards",
    "export": "export shakespeare --out {folder}/exported",
    "plot growth": "plot growth --out {folder}/growth.svg",
}

# ---------------------------------------------------------------------- names


def public(room: str) -> dict[str, Any]:
    """The public names of a room."""
    module = importlib.import_module(f"clearhead.{room}")
    own = [n for n, v in vars(module).items() if not n.startswith("_") and _home(v) == module.__name__]
    return {name: getattr(module, name) for name in getattr(module, "__all__", own)}


def _home(value: Any) -> str | None:
    return getattr(value, "__module__", None)


def members(kind: type, elsewhere: dict[str, Any]) -> dict[str, Any]:
    """The public methods and properties of a class: its own, and those of bases that are not shown `elsewhere`."""
    found: dict[str, Any] = {}
    ours = [one for one in kind.__mro__ if (_home(one) or "").startswith("clearhead")]
    for base in reversed([one for one in ours if one is kind or elsewhere.get(one.__name__) is not one]):
        for name, value in vars(base).items():
            inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", value)
            if not name.startswith("_") and name != "extra_repr" and inspect.isfunction(inner):
                found[name] = value
    return found


def fields(kind: type) -> Iterator[tuple[str, str, str, str]]:
    """Of each field of a dataclass: its name, what it takes, its default, and what its source says of it."""
    from clearhead._core.validation import words

    said = _comments(kind)
    hints = typing.get_type_hints(kind, include_extras=True) if dataclasses.is_dataclass(kind) else {}
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        default = "" if field.default is dataclasses.MISSING else repr(field.default)
        if field.default_factory is not dataclasses.MISSING:
            default = repr(field.default_factory())
        if not field.name.startswith("_"):
            takes = words(hints[field.name])
            yield field.name, takes if len(takes) < 90 else str(field.type), default, said.get(field.name, "")


def _comments(kind: type) -> dict[str, str]:
    """What stands behind a field as a comment, or under it as a string."""
    said: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        try:
            lines = textwrap.dedent(inspect.getsource(base)).splitlines()
        except (OSError, TypeError):
            continue
        (tree,) = ast.parse("\n".join(lines)).body
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for node, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                _, sign, words = lines[(node.end_lineno or 1) - 1][node.end_col_offset :].partition("#")
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    sign, words = "#", str(after.value.value)
                if sign:
                    said[node.target.id] = words.strip()
    return said


def doc_of(kind: type, name: str) -> str:
    """The docstring of a method or property, its own or that of one of our bases; empty where there is none."""
    for base in kind.__mro__:
        if (_home(base) or "").startswith("clearhead") and name in vars(base):
            value = vars(base)[name]
            said = getattr(getattr(value, "__func__", value), "__doc__", None)
            if said and said is not getattr(type(value), "__doc__", None):
                return inspect.cleandoc(said)
    return ""


class _Raw:
    """An annotation as it is written."""

    def __init__(self, annotation: Any) -> None:
        self.text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    def __repr__(self) -> str:
        return self.text


def signature(name: str, value: Any) -> str:
    """How something is called, with its shapes; in a line for each argument where it is long."""
    if isinstance(value, property | cached_property):
        value = value.fget if isinstance(value, property) else value.func
        returned = inspect.signature(value).return_annotation
        return f"{name}: {_Raw(returned)}" if returned is not inspect.Signature.empty else name
    try:
        found = inspect.signature(getattr(value, "__func__", value))
    except (TypeError, ValueError):
        return name
    empty = inspect.Parameter.empty
    parts = [
        p if p.annotation is empty else p.replace(annotation=_Raw(p.annotation)) for p in found.parameters.values()
    ]
    found = found.replace(parameters=[p for p in parts if p.name not in ("self", "cls")])
    returned = found.return_annotation
    silent = returned in (empty, None, "None")
    found = found.replace(return_annotation=empty if silent else _Raw(returned))
    line = f"{name}{found}"
    if len(line) <= 100:
        return line
    inner = [str(p) for p in found.parameters.values()]
    if any(p.kind is p.KEYWORD_ONLY for p in parts) and not any(one.startswith("*") for one in inner):
        inner.insert(next(i for i, p in enumerate(found.parameters.values()) if p.kind is p.KEYWORD_ONLY), "*")
    end = "" if found.return_annotation is empty else f" -> {found.return_annotation!r}"
    return "\n".join([f"{name}(", *[f"    {one}," for one in inner], f"){end}"])


@cache
def examples(room: str) -> tuple[str, list[str]]:
    """What the examples of a room begin with, and the examples: a few lines of Python each, apart by empty lines."""
    path = EXAMPLES / f"{room}.py"
    opening, _, rest = path.read_text(encoding="utf-8").strip().partition("\n\n\n")
    return opening, rest.split("\n\n")


def example_of(room: str, name: str) -> str:
    """The shortest example that uses a name; empty where there is none."""
    using = [block for block in examples(room)[1] if re.search(rf"\b{name}\b", block)]
    return min(using, key=len, default="")


def rooms() -> Iterator[tuple[str, str]]:
    """A page for each room: its names with signatures, fields, members and an example."""
    for room in ROOMS:
        module = importlib.import_module(f"clearhead.{room}")
        parts = [f"# `clearhead.{room}`", prose(inspect.getdoc(module) or "")]
        parts += ["The examples below begin with:", fence(examples(room)[0], "python")]
        for name, value in public(room).items():
            if not inspect.ismodule(value):
                parts += _entry(room, name, value)
        yield f"api-{room}", "\n\n".join(part for part in parts if part)


def _entry(room: str, name: str, value: Any) -> Iterator[str]:
    yield f"## `{name}`"
    if not callable(value) or typing.get_origin(value) is not None or type(value).__name__ == "UnionType":
        shown = list(value) if isinstance(value, dict | tuple) else value
        yield textwrap.fill(f"`{str(getattr(shown, '__name__', shown))[:600]}`".replace("clearhead.", ""), 110)
        return
    is_class = inspect.isclass(value)
    yield fence(signature(name, value), "python")
    yield prose(inspect.getdoc(value) or "")
    if is_class and (rows := [row for row in fields(value) if (_home(value) or "").startswith("clearhead")]):
        yield table(
            ("field", "takes", "default", ""), [(f"`{n}`", takes, f"`{d}`" if d else "", s) for n, takes, d, s in rows]
        )
    for member, held in members(value, public(room)).items() if is_class else ():
        said = doc_of(value, member)
        line = " ".join(signature(member, held).split()).replace("( ", "(").replace(", )", ")")
        yield f"`{line}`\n: " + prose(said).replace("\n", "\n  ")
    if shown := example_of(room, name):
        yield "Example:\n\n" + fence(shown, "python")


# ---------------------------------------------------------------------- files


def files() -> tuple[str, str]:
    """The TOML of models, recipes and sheets, from the very schemas by which it is read."""
    from clearhead import models, training
    from clearhead.config import Config
    from clearhead.course.exercises import schema
    from clearhead.training import presets
    from clearhead.training.tasks import DataConfig

    parts = [
        "# Files",
        "Every file is TOML that is read by the fields listed here; an unknown key is refused by name. A choice is a "
        'table with its `type`, such as `positions = {type = "LearnedPositions", max_len = 512}`.',
        "## Models: `config.toml`",
        "Beside the weights (`model.safetensors`); `type` is the name of the configuration.",
    ]
    kinds = [v for v in vars(models).values() if inspect.isclass(v) and issubclass(v, Config) and v is not Config]
    for kind in dict.fromkeys(kinds):
        parts += [f"### `{kind.__name__}`", prose(inspect.getdoc(kind) or ""), _field_table(kind)]
    parts += ["## Recipes: `train.toml`", "What `clearhead train` writes into a run's folder: three tables."]
    parts += ["The first preset as it is written:", fence(presets.recipe(training.TASKS[-1]).to_toml(), "toml")]
    for kind in (training.TrainConfig, *_subclasses(DataConfig)):
        parts += [f"### `{kind.__name__}`", prose(inspect.getdoc(kind) or ""), _field_table(kind)]
    parts += ["## Sheets: `problem.toml`", "`clearhead exercise new my.toml KIND` writes a commented template."]
    for one in (None, *schema.PROBLEM_TYPES):
        says, keys = schema.schema(one)
        rows = [(f"`{k.name}`", "optional" if k.optional else "", prose(k.description), f"`{k.example}`") for k in keys]
        parts += [f"### {one or 'every kind'}", prose(says), table(("key", "", "what it is", "example"), rows)]
    return "files", "\n\n".join(parts)


def _subclasses(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _field_table(kind: type) -> str:
    rows = [
        (f"`{name}`", takes, f"`{default}`" if default else "", said) for name, takes, default, said in fields(kind)
    ]
    return table(("field", "takes", "default", ""), rows)


# ---------------------------------------------------------------------- commands


def commands() -> tuple[str, str]:
    """Every command: its help, what it prints, and the JSON of it; of a measurement, that of the committed results."""
    from clearhead.cli.app import every_command

    parts = [
        "# Commands",
        "Each prints for people, and with `--json` one JSON document for programs. The status is 0, 1 with one line "
        "that says what is wrong, or 2 for wrong usage.",
    ]
    helps = {" ".join(words): ran(*words, "--help") for words in every_command()}
    found = {}
    with tempfile.TemporaryDirectory() as people, tempfile.TemporaryDirectory() as programs:
        for folder in (people, programs):
            Path(folder, "book.txt").write_text("To be, or not to be, that is the question.\n" * 40, encoding="utf-8")
            Path(folder, "answers.toml").write_text('mean = 3.5\nvariance = "21/4"\n', encoding="utf-8")
        for name, line in COMMANDS.items():
            document = ran(*shlex.split(line.format(folder=programs)), "--json") if "--json" in helps[name] else "null"
            told = ran(*shlex.split(line.format(folder=people))).replace(f"{people}/", "")
            found[name] = _cut(told), shape(json.loads(document))
    for name, told in helps.items():
        parts += [f"## `clearhead {name}`", fence(told, "text")]
        if name in COMMANDS:
            line = "clearhead " + COMMANDS[name].replace("{folder}/", "")
            parts += [fence(line, "sh"), fence(found[name][0], "text"), "Its JSON:", fence(found[name][1], "text")]
        results = RESULTS / f"{name.partition(' ')[2]}.json"
        if name.startswith("bench ") and results.exists():
            document = shape(json.loads(results.read_text(encoding="utf-8")))
            parts += ["Its JSON, as in the committed results:", fence(document, "text")]
    return "commands", "\n\n".join(parts)


def ran(*words: str) -> str:
    """What a command prints in 80 columns, in this process; an error of its own stops the build."""
    from clearhead.cli import main

    told, before = io.StringIO(), (sys.argv, sys.stdin, dict(os.environ))
    sys.argv, sys.stdin, os.environ["COLUMNS"] = ["clearhead", *words], io.StringIO("1\n"), "80"
    try:
        with contextlib.redirect_stdout(told):
            main()
    except SystemExit as stop:
        if stop.code:
            raise RuntimeError(f"clearhead {shlex.join(words)} ended with {stop.code}") from stop
    finally:
        sys.argv, sys.stdin, environment = before
        os.environ.clear()
        os.environ.update(environment)
    return "\n".join(line.rstrip() for line in told.getvalue().splitlines())


def shape(value: Any, depth: int = 0) -> str:
    """The shape of a JSON document: its keys with the type of each, of a list its first item."""
    pad = "  " * (depth + 1)
    if isinstance(value, dict) and value:
        inner = [f"{pad}{key}: {shape(one, depth + 1)}" for key, one in value.items()]
        if (
            len(value) > 6
            and len({type(one) for one in value.values()}) == 1
            and isinstance(next(iter(value.values())), dict)
        ):
            inner = [inner[0], f"{pad}…: the same for each of {len(value)} names"]
        return "{\n" + "\n".join(inner) + "\n" + "  " * depth + "}"
    if isinstance(value, list) and value:
        return f"[{shape(value[0], depth)}, …]" if len(value) > 1 else f"[{shape(value[0], depth)}]"
    plain = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}
    return plain.get(type(value), "[]" if value == [] else "{}")


def _cut(text: str, most: int = 40) -> str:
    lines = text.splitlines()
    return text if len(lines) <= most else "\n".join([*lines[:most], f"… and {len(lines) - most} more lines"])


# ---------------------------------------------------------------------- Markdown


def fence(text: str, language: str) -> str:
    """Text as it is."""
    return f"````{language}\n{text}\n````"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of Markdown; empty without rows."""
    cells = [[" ".join(str(cell).split()).replace("|", "\\|") for cell in row] for row in rows]
    kept = [i for i in range(len(head)) if any(row[i] for row in cells)]
    lines = [[head[i] for i in kept], ["---"] * len(kept), *([row[i] for i in kept] for row in cells)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) if rows else ""


def prose(text: str) -> str:
    """A docstring as Markdown: what is indented is code, and what only looks like markup is not."""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        if all(line.startswith("    ") or not line for line in block.split("\n")) or block.lstrip().startswith(">>>"):
            code = textwrap.dedent(block)
            blocks.append(fence(code, "python" if _is_python(code) else "text"))
        else:
            pieces = re.split(r"(`[^`]*`)", block)
            blocks.append("".join(p if p.startswith("`") else re.sub(r"([<>*$_\[\]#|~])", r"\\\1", p) for p in pieces))
    return "\n\n".join(blocks).strip()


def _is_python(code: str) -> bool:
    try:
        return bool(ast.parse(code))
    except SyntaxError:
        return False


def write(app: Sphinx | None = None) -> None:
    """Write every page, where it is not there as it should be."""
    for name, text in [*rooms(), files(), commands()]:
        path = OUT / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text + "\n":
            path.write_text(text + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
