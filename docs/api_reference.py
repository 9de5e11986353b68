"""Generate the reference when the site is built: public names, fields, commands, files and JSON documents.

`packages()` reads the packages, `files()` the schemas of the TOML files, `commands()` the help and the output of each
command. Examples are blocks of `reference/examples/PACKAGE.py`; each is shown under every name that it uses.
`tests/docs/test_reference.py` runs them and checks that every public name has a docstring.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
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
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

if typing.TYPE_CHECKING:
    from sphinx.application import Sphinx  # only for the build; the tests run without Sphinx

DOCS = Path(__file__).parent
OUT = DOCS / "reference"
EXAMPLES = OUT / "examples"
REPOSITORY = "https://github.com/clearhead-transformers/clearhead"

PACKAGES = (
    "errors",
    "masks",
    "attention",
    "attention.biases",
    "nn",
    "nn.positions",
    "nn.mel",
    "models",
    "data",
    "data.audio",
    "training",
    "generation",
    "hub",
    "hub.checkpoint",
    "analysis",
    "analysis.cost",
    "analysis.checks",
    "course.exercises",
    "course.proofs",
    "course.exams",
    "course.claims",
    "course.sources",
)

# An example call of each command, in this order. It is run as it is, and with --json if the command has that option.
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
    "exercise proof": "exercise proof weights-sum-to-one",
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
}

# ---------------------------------------------------------------------- names


def public(package: str) -> dict[str, Any]:
    """Return the public names of a package and their values."""
    module = importlib.import_module(f"clearhead.{package}")
    names = [n for n, v in vars(module).items() if not n.startswith("_") and _module_of(v) == module.__name__]
    return {name: getattr(module, name) for name in getattr(module, "__all__", names)}


def _module_of(value: Any) -> str | None:
    return getattr(value, "__module__", None)


def members(kind: type, documented: dict[str, Any]) -> dict[str, Any]:
    """Return the public methods and properties of a class and of its bases, except bases in `documented`.

    The default of a field of a dataclass can be a function, which is not a method.
    """
    members_by_name: dict[str, Any] = {}
    fields_of_class = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    bases = [base_class for base_class in kind.__mro__ if (_module_of(base_class) or "").startswith("clearhead")]
    for base in reversed(
        [
            base_class
            for base_class in bases
            if base_class is kind or documented.get(base_class.__name__) is not base_class
        ]
    ):
        for name, value in vars(base).items():
            inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", value)
            if name.startswith("_") or name == "extra_repr" or name in fields_of_class:
                continue
            if inspect.isfunction(inner):
                members_by_name[name] = value
    return members_by_name


def fields(kind: type) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, accepted values, default and description of each field of a dataclass."""
    from clearhead._core.validation import describe

    descriptions = _comments(kind)
    hints = typing.get_type_hints(kind, include_extras=True) if dataclasses.is_dataclass(kind) else {}
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        default = "" if field.default is dataclasses.MISSING else _default_text(field.default)
        if field.default_factory is not dataclasses.MISSING:
            default = repr(field.default_factory())
        if not field.name.startswith("_"):
            accepted = describe(hints[field.name])
            yield (
                field.name,
                accepted if len(accepted) < 90 else str(field.type),
                default,
                descriptions.get(field.name, ""),
            )


def _comments(kind: type) -> dict[str, str]:
    """Return the description of each field: the comment after it or the string below it."""
    descriptions: dict[str, str] = {}
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
                    words = re.sub(r"^ *type: ignore(\[[\w, -]*\])?[ #]*", "", words)  # a comment for type checkers
                    descriptions[node.target.id] = words.strip()
    return descriptions


def doc_of(kind: type, name: str) -> str:
    """Return the docstring of a method or property, or that of a base class of clearhead; empty if undocumented."""
    for base in kind.__mro__:
        if (_module_of(base) or "").startswith("clearhead") and name in vars(base):
            value = vars(base)[name]
            docstring = getattr(getattr(value, "__func__", value), "__doc__", None)
            if docstring and docstring is not getattr(type(value), "__doc__", None):
                return inspect.cleandoc(docstring)
    return ""


class _Raw:
    """An annotation that prints as its source text."""

    def __init__(self, annotation: Any) -> None:
        if isinstance(annotation, typing.ForwardRef):  # of a named tuple
            annotation = annotation.__forward_arg__
        self.text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    def __repr__(self) -> str:
        return self.text


def _default_text(value: Any) -> str:
    """Return a default as Python: functions by their names, long values and objects without a text as an ellipsis."""
    if inspect.isfunction(value) and value.__name__.isidentifier():
        return value.__name__
    text = re.sub(r"<[\w.<> ]+ at 0x[0-9a-f]+>", "...", repr(value))
    constructor = re.match(r"\w+(?=\()", text)
    return text if len(text) <= 100 else f"{constructor[0]}(...)" if constructor else "..."


def signature(name: str, value: Any) -> str:
    """Return a signature with shapes; long signatures have one line per argument."""
    if isinstance(value, property | cached_property):
        value = value.fget if isinstance(value, property) else value.func
        returned = inspect.signature(value).return_annotation
        return f"{name}: {_Raw(returned)}" if returned is not inspect.Signature.empty else name
    try:
        call = inspect.signature(getattr(value, "__func__", value))
    except (TypeError, ValueError):
        return name
    empty = inspect.Parameter.empty
    parts = [p if p.annotation is empty else p.replace(annotation=_Raw(p.annotation)) for p in call.parameters.values()]
    parts = [p if p.default is empty else p.replace(default=_Raw(_default_text(p.default))) for p in parts]
    call = call.replace(parameters=[p for p in parts if p.name not in ("self", "cls")])
    returned = call.return_annotation
    returns_none = returned in (empty, None, "None")
    call = call.replace(return_annotation=empty if returns_none else _Raw(returned))
    line = re.sub(r"<class '([\w.]+)'>", r"\1", f"{name}{call}")
    if len(line) <= 100:
        return line
    inner = [re.sub(r"<class '([\w.]+)'>", r"\1", str(p)) for p in call.parameters.values()]
    if any(p.kind is p.KEYWORD_ONLY for p in parts) and not any(part.startswith("*") for part in inner):
        inner.insert(next(i for i, p in enumerate(call.parameters.values()) if p.kind is p.KEYWORD_ONLY), "*")
    end = "" if call.return_annotation is empty else f" -> {call.return_annotation!r}"
    return "\n".join([f"{name}(", *[f"    {part}," for part in inner], f"){end}"])


@cache
def examples(package: str) -> tuple[str, list[str]]:
    """Return the imports of a package's examples, and the examples, which are separated by empty lines."""
    path = EXAMPLES / f"{package.replace('.', '_')}.py"
    imports, _, body = path.read_text(encoding="utf-8").strip().partition("\n\n\n")
    return imports, body.split("\n\n")


def example_of(package: str, name: str) -> str:
    """Return the shortest example that uses a name, or an empty string."""
    using = [block for block in examples(package)[1] if re.search(rf"\b{name}\b", block)]
    return min(using, key=len, default="")


def packages() -> Iterator[tuple[str, str]]:
    """Yield one page per package: its names with signatures, fields, members and an example."""
    for package in PACKAGES:
        module = importlib.import_module(f"clearhead.{package}")
        names = {name: value for name, value in public(package).items() if not inspect.ismodule(value)}
        parts = [f"# `clearhead.{package}`", prose(inspect.getdoc(module) or "")]
        parts += [
            table(
                ("name", "description"),
                [(f"[`{name}`](#{anchor(package, name, value)})", _summary(value)) for name, value in names.items()],
            )
        ]
        parts += ["The examples below begin with:", fence(examples(package)[0], "python")]
        for name, value in names.items():
            parts += _entry(package, name, value)
        yield f"api-{package.replace('.', '-')}", "\n\n".join(part for part in parts if part)


def package_index() -> tuple[str, str]:
    """Return the page that lists the packages with a sentence each, and the names of `clearhead` with links."""
    import clearhead

    rows, pages = [], {}
    for package in PACKAGES:
        module = importlib.import_module(f"clearhead.{package}")
        page = f"api-{package.replace('.', '-')}"
        rows.append((f"[`clearhead.{package}`]({page}.md)", _sentence(inspect.getdoc(module))))
        for name, value in public(package).items():
            pages.setdefault(name, (f"{page}.md#{anchor(package, name, value)}", value))
    top_level = [
        (f"[`{name}`]({pages[name][0]})", _summary(pages[name][1]))
        for name in clearhead.__all__
        if name in pages and getattr(clearhead, name) is pages[name][1]
    ]
    entries = [f"{package} <api-{package.replace('.', '-')}>" for package in sorted(PACKAGES)]
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *entries, "```"])
    parts = ["# Packages", table(("package", "description"), rows), "## Names of `clearhead`"]
    parts += [
        "`import clearhead as ch` provides the most common names, such as `ch.attend`.",
        table(("name", "description"), top_level),
    ]
    return "packages", "\n\n".join([*parts, toctree])


def anchor(package: str, name: str, value: Any) -> str:
    """Return the label of a name; labels ignore case, so that classes and functions need different prefixes."""
    kind = "class" if inspect.isclass(value) else "name"
    return f"{kind}-{package}-{name}".lower().replace("_", "-").replace(".", "-")


def _summary(value: Any) -> str:
    """Return the first sentence of the docstring of a public name; constants have none."""
    if not (inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value))):
        return ""
    return prose(" ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()))


def _entry(package: str, name: str, value: Any) -> Iterator[str]:
    yield f"({anchor(package, name, value)})=\n## `{name}`"
    if not callable(value) or typing.get_origin(value) is not None or type(value).__name__ == "UnionType":
        example = list(value) if isinstance(value, dict | tuple) else value
        if isinstance(example, list) and all(dataclasses.is_dataclass(item) for item in example):
            example = [item.name for item in example]
        if isinstance(value, Path) and value.is_relative_to(DOCS.parent):
            example = value.relative_to(DOCS.parent)  # the same on every machine
        text = str(getattr(example, "__name__", example)).replace("clearhead.", "")
        yield textwrap.fill(f"`{textwrap.shorten(text, 600, placeholder=' …')}`", 110)
        return
    is_class = inspect.isclass(value)
    if getattr(value, "_is_protocol", False):
        yield fence(f"class {name}(Protocol)", "python")
    elif is_class and issubclass(value, enum.Enum):
        yield fence("\n".join(f"{name}.{member.name} = {member.value!r}" for member in value), "python")
    else:
        yield fence(signature(name, value), "python")
    yield prose(inspect.getdoc(value) or "")
    yield from _source(value)
    if is_class and (rows := [row for row in fields(value) if (_module_of(value) or "").startswith("clearhead")]):
        yield table(
            ("field", "values", "default", "description"),
            [(f"`{n}`", accepted, f"`{d}`" if d else "", s) for n, accepted, d, s in rows],
        )
    for member, value_of_member in members(value, public(package)).items() if is_class else ():
        docstring = doc_of(value, member)
        line = " ".join(signature(member, value_of_member).split()).replace("( ", "(").replace(", )", ")")
        yield f"`{line}`\n: " + prose(docstring).replace("\n", "\n  ")
    if example := example_of(package, name):
        yield "Example:\n\n" + fence(example, "python")


def _source(value: Any) -> Iterator[str]:
    """Yield a link to the definition of a class or function of the package."""
    value = value if inspect.isclass(value) else inspect.unwrap(value)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return
    root = DOCS.parent
    path = Path(inspect.getsourcefile(value) or "")
    if not path.is_relative_to(root / "clearhead"):
        return
    name = path.relative_to(root).as_posix()
    line = inspect.getsourcelines(value)[1]
    text = name.replace("_", r"\_")  # __init__ would be bold
    yield f"Source: [{text}, line {line}]({REPOSITORY}/blob/main/{name}#L{line})"


# ---------------------------------------------------------------------- files


def files() -> tuple[str, str]:
    """Return the page of TOML files: models, recipes and worksheets, from the schemas that read them."""
    from clearhead import models, training
    from clearhead.config import Config
    from clearhead.course.exercises import schema
    from clearhead.training import presets
    from clearhead.training.tasks import DataConfig

    parts = [
        "# Files",
        "Every file is TOML with the fields listed here; an unknown key is rejected by name. A choice is a "
        'table with its `type`, such as `positions = {type = "LearnedPositions", max_len = 512}`.',
        "## Models: `config.toml`",
        "Stored next to the parameters (`model.safetensors`); `type` is the name of the configuration.",
    ]
    kinds = [v for v in vars(models).values() if inspect.isclass(v) and issubclass(v, Config) and v is not Config]
    for kind in dict.fromkeys(kinds):
        parts += [f"### `{kind.__name__}`", prose(inspect.getdoc(kind) or ""), _field_table(kind)]
    parts += [
        "## Recipes: `train.toml`",
        "`clearhead train` writes this file into the folder of a run. It has three tables.",
    ]
    parts += ["The first preset:", fence(presets.recipe(training.TASKS[-1]).to_toml(), "toml")]
    for kind in (training.TrainConfig, *_subclasses(DataConfig)):
        parts += [f"### `{kind.__name__}`", prose(inspect.getdoc(kind) or ""), _field_table(kind)]
    parts += ["## Worksheets: `problem.toml`", "`clearhead exercise new my.toml KIND` writes a commented template."]
    for problem_type in (None, *schema.PROBLEM_TYPES):
        description, keys = schema.schema(problem_type)
        rows = [(f"`{k.name}`", "optional" if k.optional else "", prose(k.description), f"`{k.example}`") for k in keys]
        parts += [
            f"### {problem_type or 'every kind'}",
            prose(description),
            table(("key", "presence", "description", "example"), rows),
        ]
    return "files", "\n\n".join(parts)


def _subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _field_table(kind: type) -> str:
    rows = [
        (f"`{name}`", accepted, f"`{default}`" if default else "", description)
        for name, accepted, default, description in fields(kind)
    ]
    return table(("field", "values", "default", "description"), rows)


# ---------------------------------------------------------------------- commands


def commands() -> Iterator[tuple[str, str]]:
    """Yield the list of commands, and one page per command: arguments, options, an example, the shape of its JSON."""
    from clearhead.cli.app import every_command

    parsed = {" ".join(words): _command(words) for words in every_command()}
    outputs = dict(_example_outputs(parsed))
    rows = [(f"[`clearhead {name}`]({_slug(name)}.md)", _sentence(command.help)) for name, command in parsed.items()]
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *(f"{name} <{_slug(name)}>" for name in parsed), "```"])
    about = (
        "Commands print text; with `--json` they print one JSON document. The exit status is 0, 1 with a one-line "
        "error message, or 2 for wrong usage. `clearhead COMMAND --help` prints the same descriptions."
    )
    yield "commands", "\n\n".join(["# Commands", about, table(("command", "description"), rows), toctree])
    for name, command in parsed.items():
        parts = [f"# `clearhead {name}`", _help(command.help), *_parameter_tables(name, command)]
        subcommands = [(other, parsed[other]) for other in parsed if other.startswith(f"{name} ")]
        links = [(f"[`clearhead {other}`]({_slug(other)}.md)", _sentence(sub.help)) for other, sub in subcommands]
        parts += [table(("command", "description"), links)]
        if name in COMMANDS:
            text, json_shape = outputs[name]
            line = "clearhead " + COMMANDS[name].replace("{folder}/", "")
            parts += ["## Example", fence(line, "sh"), fence(text, "text")]
            parts += ["The JSON document of `--json`:", fence(json_shape, "text")] if json_shape != "null" else []
        yield _slug(name), "\n\n".join(part for part in parts if part)


def _command(words: Sequence[str]) -> Any:
    """Return the parsed definition of a command, such as ("exercise", "solve")."""
    import typer

    from clearhead.cli.app import whole_app

    command: Any = typer.main.get_command(whole_app())
    for word in words:
        command = command.commands[word]
    return command


def _slug(name: str) -> str:
    return f"command-{name.replace(' ', '-')}"


def _sentence(text: str | None) -> str:
    """Return the first paragraph of a help text as Markdown."""
    return _help((text or "").split("\n\n")[0])


def _help(text: str | None) -> str:
    """Return a help text as Markdown, with options as code."""
    pieces = re.split(r"(`[^`]*`)", text or "")
    pieces[::2] = [re.sub(r"(?<![\w-])(--[a-z][\w-]*)", r"`\1`", piece) for piece in pieces[::2]]
    return prose("".join(pieces))


def _parameter_tables(name: str, command: Any) -> Iterator[str]:
    """Yield the usage line, the table of arguments and the table of options of a command."""
    arguments = [p for p in command.params if p.param_type_name == "argument" and not p.hidden]
    options = [p for p in command.params if p.param_type_name != "argument" and not p.hidden]
    usage = [f"[{_placeholder(p)}]" if not p.required else _placeholder(p) for p in arguments]
    yield fence(" ".join(["clearhead", name, *usage, *(["[OPTIONS]"] if options else [])]), "text")
    yield table(("argument", "description"), [(f"`{_placeholder(p)}`", _help(p.help)) for p in arguments])
    rows = [
        (
            ", ".join(f"`{flag}`" for flag in [*p.opts, *p.secondary_opts]),
            _value_range(p),
            _default(p),
            _help(p.help),
        )
        for p in options
    ]
    yield table(("option", "value", "default", "description"), rows)


def _placeholder(parameter: Any) -> str:
    return (parameter.metavar or parameter.name.strip("_").upper()) + ("…" if parameter.nargs == -1 else "")


def _value_range(parameter: Any) -> str:
    """Return what an option accepts: nothing for a flag, else its type with its limits."""
    if getattr(parameter, "is_flag", False):
        return ""
    kind = parameter.type_descriptor.annotation
    kind = next(iter(typing.get_args(kind)), kind)  # list[str] is a repeatable str
    text = {int: "integer", float: "number", str: "text", Path: "path"}.get(kind, getattr(kind, "__name__", "value"))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        text = ", ".join(f"`{member.value}`" for member in kind)
    low, high = getattr(parameter, "min", None), getattr(parameter, "max", None)
    limits = [f"≥ {low:g}"] if low is not None else []
    limits += [f"≤ {high:g}"] if high is not None else []
    return f"{text} {', '.join(limits)}".strip() + (", repeatable" if parameter.multiple else "")


def _default(parameter: Any) -> str:
    if parameter.default in (None, False, [], ()) or callable(parameter.default):
        return ""
    return f"`{parameter.default}`"


def _example_outputs(parsed: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Run the example of each command, as text and as JSON, and yield its output and the shape of its document."""
    with tempfile.TemporaryDirectory() as text_folder, tempfile.TemporaryDirectory() as json_folder:
        for folder in (text_folder, json_folder):
            Path(folder, "book.txt").write_text("To be, or not to be, that is the question.\n" * 40, encoding="utf-8")
            Path(folder, "answers.toml").write_text('mean = 3.5\nvariance = "21/4"\n', encoding="utf-8")
        for name, line in COMMANDS.items():
            document = "null"
            if "json" in {parameter.name for parameter in parsed[name].params}:
                document = run(*shlex.split(line.format(folder=json_folder)), "--json")
            output = run(*shlex.split(line.format(folder=text_folder))).replace(f"{text_folder}/", "")
            yield name, (_truncate(output), shape(json.loads(document)))


def run(*words: str) -> str:
    """Run a command in this process and return its output at 80 columns; an error stops the build."""
    from clearhead.cli import main

    output, before = io.StringIO(), (sys.argv, sys.stdin, dict(os.environ))
    sys.argv, sys.stdin, os.environ["COLUMNS"] = ["clearhead", *words], io.StringIO("1\n"), "80"
    try:
        with contextlib.redirect_stdout(output):
            main()
    except SystemExit as stop:
        if stop.code:
            raise RuntimeError(f"clearhead {shlex.join(words)} ended with {stop.code}") from stop
    finally:
        sys.argv, sys.stdin, environment = before
        os.environ.clear()
        os.environ.update(environment)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def shape(value: Any, depth: int = 0) -> str:
    """Return the keys and types of a JSON document; a list is described by its first item."""
    pad = "  " * (depth + 1)
    if isinstance(value, dict) and value:
        inner = [f"{pad}{key}: {shape(item, depth + 1)}" for key, item in value.items()]
        if (
            len(value) > 6
            and len({type(item) for item in value.values()}) == 1
            and isinstance(next(iter(value.values())), dict)
        ):
            inner = [inner[0], f"{pad}…: the same for each of {len(value)} names"]
        return "{\n" + "\n".join(inner) + "\n" + "  " * depth + "}"
    if isinstance(value, list) and value:
        return f"[{shape(value[0], depth)}, …]" if len(value) > 1 else f"[{shape(value[0], depth)}]"
    type_names = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}
    return type_names.get(type(value), "[]" if value == [] else "{}")


def _truncate(text: str, max_lines: int = 40) -> str:
    lines = text.splitlines()
    if len(lines) <= max_lines:
        return text
    return "\n".join([*lines[:max_lines], f"… and {len(lines) - max_lines} more lines"])


# ---------------------------------------------------------------------- Markdown

SECTIONS = ("Args:", "Attributes:", "Returns:", "Yields:", "Raises:")


def fence(text: str, language: str) -> str:
    """Return a fenced block."""
    return f"````{language}\n{text}\n````"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table, without empty columns; empty without rows."""
    cells = [[re.sub(r"(?<!\\)\|", r"\\|", " ".join(str(cell).split())) for cell in row] for row in rows]
    columns = [i for i in range(len(head)) if any(row[i] for row in cells)]
    lines = [[head[i] for i in columns], ["---"] * len(columns), *([row[i] for i in columns] for row in cells)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) if rows else ""


def prose(text: str) -> str:
    """Return a docstring as Markdown: indented blocks are code, sections are lists, and other markup is escaped."""
    blocks, code = [], []
    for block in [*re.split(r"\n\s*\n", text), ""]:
        title, _, items = block.partition("\n")
        if title == "Example:" and items.startswith("    "):
            blocks.append("**Example**")
            block = items
        if block and (all(line.startswith("    ") or not line for line in block.split("\n")) or _is_session(block)):
            code.append(textwrap.dedent(block))  # neighboring blocks of code are one block
            continue
        if code:
            blocks.append(_code("\n\n".join(code)))
            code = []
        if title in SECTIONS and items.startswith("    "):
            blocks += [f"**{title[:-1]}**", _items(textwrap.dedent(items))]
        else:
            pieces = re.split(r"(`[^`]*`)", block)
            blocks.append("".join(p if p.startswith("`") else re.sub(r"([<>*$_\[\]#|~])", r"\\\1", p) for p in pieces))
    return "\n\n".join(blocks).strip()


def _is_session(block: str) -> bool:
    return block.lstrip().startswith(">>>")


def _code(code: str) -> str:
    """Return a block of code; an interactive session without output is shown without its prompts."""
    if all(line.startswith((">>> ", "... ")) for line in code.split("\n")):
        code = re.sub(r"^(>>>|\.\.\.) ", "", code, flags=re.MULTILINE)
    return fence(code, "pycon" if _is_session(code) else "python" if _is_python(code) else "text")


def _items(text: str) -> str:
    """Return the entries of a docstring section as a Markdown list; a line without a name continues an entry."""
    name = r"\*{0,2}\w+(?: \([^)]*\))?"
    entries = re.split(rf"\n(?={name}: )", text.strip())
    lines = [" ".join(entry.split()) for entry in entries]
    return "\n".join("- " + re.sub(rf"^({name}):", r"`\1`:", line) for line in lines)


def _is_python(code: str) -> bool:
    try:
        return bool(ast.parse(code))
    except SyntaxError:
        return False


def write(app: Sphinx | None = None) -> None:
    """Write every page that changed."""
    for name, text in [*packages(), package_index(), files(), *commands()]:
        path = OUT / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text + "\n":
            path.write_text(text + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the generator with Sphinx."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
