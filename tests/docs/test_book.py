"""Pages are well-formed and everything they name exists. `make docs` builds them all."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import tomllib

import matplotlib as mpl
import pytest
import typer

from benchmarks.studies import STUDIES
from clearhead.cli.app import _COMMANDS, app
from clearhead.course.claims import claims
from clearhead.course.exercises import bundled_problems
from clearhead.course.exercises.starter_code import starters
from clearhead.errors import ConfigError
from clearhead.hub import names
from clearhead.training import PRESETS
from tests.docs.pages import DOCS, pages, read_page

PAGES = pages()
CHAPTERS = [page for page in PAGES if re.match(r"book/\d\d-", page.name)]
PLACEHOLDERS = {"NAME", "ID", "FILE", "FOLDER"}
DISPLAYED = {"bars", "draw", "draw_on_grid", "figure_to_svg", "heat", "lines", "matrices", "table"}


@pytest.fixture(scope="module")
def command_line():
    for name in _COMMANDS:
        importlib.import_module(f"clearhead.cli.{name}")
    return typer.main.get_command(app)


def parse_command(command, words):
    """Return the commands that these words call; raise for unknown options and commands."""
    context = typer.Context(command)
    if hasattr(command, "resolve_command") and words and not words[0].startswith("-"):
        name, subcommand, remaining = command.resolve_command(context, words)
        return [name, *parse_command(subcommand, remaining)]
    _, unparsed, _ = command.make_parser(context).parse_args(args=list(words))
    assert not unparsed, f"{unparsed} was not parsed"
    return []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_is_well_formed(page):
    assert page.text.count("\n# ") + page.text.startswith("# ") >= 1, "a page has a title"
    assert len(re.findall(r"^```", page.text, re.MULTILINE)) == 2 * len(page.fences), "a fence is not closed"
    if page.cells:
        assert page.text.startswith("---\nfile_format: mystnb\nkernelspec:"), "a page with cells says so in its header"
    for cell in page.cells:
        ast.parse(cell)
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", re.sub(r"```.*?```", "", page.text, flags=re.DOTALL)):
        assert (page.path.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_cells_assign_each_variable_in_its_own_statement(page):
    for cell in page.cells:
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.Assign):
                assert len(node.targets) == 1, ast.unparse(node)
                assert not (isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)), ast.unparse(
                    node
                )


@pytest.mark.parametrize("page", [*PAGES, read_page("index.md")], ids=lambda page: page.name)
def test_cells_display_every_table_and_picture(page):
    for cell in page.cells:
        tree = ast.parse(cell)
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node is not tree.body[-1]:
                function = ast.unparse(node.value.func).rpartition(".")[2]
                assert function not in DISPLAYED, f"only the last line of a cell is displayed: {ast.unparse(node)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_names_only_what_exists(page, command_line):
    claim_ids = set(claims())
    for words in page.commands:
        line = " ".join(words)
        assert words[0] == "clearhead", line
        called = parse_command(command_line, words[1:])
        arguments = [word for word in words[1 + len(called) :] if not word.startswith("-")]
        if PLACEHOLDERS.intersection(words) or not arguments:
            continue
        if called == ["claims", "show"]:
            assert arguments[0] in claim_ids, line
        elif called == ["exercise", "starter"] or (called == ["exercise", "grade"] and line.endswith(".py")):
            assert arguments[0] in starters(), line
        elif called in (["exercise", "solve"], ["exercise", "grade"]) and not arguments[0].endswith(".toml"):
            assert arguments[0] in bundled_problems(), line
        elif called in (["walk"], ["inspect"], ["models"]) and "/" not in arguments[0] and "." not in arguments[0]:
            assert arguments[0] in names(), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_sets_only_existing_settings(page):
    recipes = [preset() for presets in PRESETS.values() for preset in presets.values()]
    for name in re.findall(r"--set '?([\w.]+)=", page.text):
        assert any(has_setting(recipe, name) for recipe in recipes), name


def has_setting(recipe, name):
    try:
        recipe.get(name)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_page_names_only_existing_studies(page):
    named = re.findall(r"python -m benchmarks study ([\w-]+)", page.text)
    assert set(named) <= set(STUDIES)


@pytest.mark.parametrize(
    "page", [*PAGES, read_page("index.md"), read_page("benchmarks.md")], ids=lambda page: page.name
)
def test_rows_of_tables_have_one_cell_per_column(page):
    prose = re.sub(r"```.*?```", "", page.text, flags=re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", prose, re.MULTILINE):
        head, *rows = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert set(rows) == {head}, table


def test_parse_command_with_unknown_names_raises(command_line):
    with pytest.raises(Exception, match="No such option: --sead"):
        parse_command(command_line, ["exercise", "solve", "sort-dedup", "--sead", "7"])
    with pytest.raises(Exception, match="No such command 'wrok'"):
        parse_command(command_line, ["wrok", "sort-dedup"])


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.name)
def test_chapter_starts_with_goals_and_ends_with_its_closing_sections(page):
    headings = re.findall(r"^## (.+)$", page.text, re.MULTILINE)
    assert headings[-4:] == ["Summary", "Exercises", "Claims and exam questions", "Further reading"]
    assert ":::{admonition} Goals and prerequisites" in page.text[: page.text.index("\n## ")]
    summary = page.text.split("\n## Summary\n")[1].split("\n## ")[0]
    assert re.findall(r"^(\d+)\. ", summary, re.MULTILINE) == [str(i) for i in range(1, 11)], "ten lines"


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.name)
def test_chapter_has_one_solution_per_exercise(page):
    exercises = page.text.split("\n## Exercises\n")[1].split("\n## ")[0]
    numbers = re.findall(r"^(\d+)\. ", exercises, re.MULTILINE)
    assert len(numbers) >= 3
    assert re.findall(r"Solution of exercise (\d+)", exercises) == numbers


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.name)
def test_chapter_cites_entries_of_the_bibliography(page):
    entries = set(re.findall(r"^@\w+\{(\w+),", (DOCS / "references.bib").read_text(encoding="utf-8"), re.MULTILINE))
    cited = {key for keys in re.findall(r"\{cite:[pt]\}`([^`]+)`", page.text) for key in keys.split(",")}
    assert cited
    assert cited <= entries


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.name)
def test_chapter_runs_its_exercises_and_claims(page):
    called = [words[1:3] for words in page.commands]
    assert ["exercise", "solve"] in called, "an exercise is a sheet"
    assert ["claims", "show"] in called


def test_diagrams_are_well_formed_and_use_the_color_of_the_page(monkeypatch):
    from xml.etree import ElementTree

    monkeypatch.syspath_prepend(DOCS)
    diagrams = importlib.import_module("diagrams")
    tokens = ["a", "b < c"]
    drawings = [
        diagrams.lookup(),
        diagrams.heads(),
        diagrams.grouped_heads(),
        diagrams.block("pre"),
        diagrams.block("post"),
        diagrams.merges("a<b", [("<", "b")]),
        diagrams.patches(),
        diagrams.encoder_decoder(tokens, tokens, tokens),
        diagrams.rotation(),
        diagrams.key_value_cache(tokens),
        diagrams.ctc_lattice("AA", 4),
        diagrams.flash_tiles(),
    ]
    for drawing in drawings:
        figure = ElementTree.fromstring(drawing._repr_html_())
        assert figure[0].get("fill") == "currentColor"
        assert figure.find(".//title").text


def test_colors_of_plots_have_contrast_in_both_themes(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    colors = importlib.import_module("plotting").COLORS
    style = (DOCS / "_static" / "site.css").read_text(encoding="utf-8")
    themes = re.findall(
        r"--plot-1: (#\w+); --plot-2: (#\w+); --plot-3: (#\w+); --plot-4: (#\w+); --plot-5: (#\w+); --plot-6: (#\w+)",
        style,
    )
    light, dark, dark_by_system = themes
    assert light == colors
    assert dark == dark_by_system
    assert min(contrast(color, "#ffffff") for color in light) >= 3
    assert min(contrast(color, "#131416") for color in dark) >= 4.5
    assert contrast(light[1], "#ffffff") >= 4.5, "the color of labels in diagrams"


def contrast(first, second):
    """Return the contrast ratio of two colors by WCAG 2."""
    luminances = []
    for color in (first, second):
        values = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in values]
        luminances.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)


def test_ctc_lattice_forbids_the_skip_between_equal_symbols(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    diagrams = importlib.import_module("diagrams")
    n_arrows = {text: diagrams.ctc_lattice(text, 3)._repr_html_().count("<polygon") for text in ("AA", "AB")}
    assert n_arrows["AA"] < n_arrows["AB"]


def test_plotting_helpers_return_html(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    show = importlib.import_module("plotting")
    from xml.etree import ElementTree

    grid = ElementTree.fromstring(show.heat([[1.0, -0.5], [0.0, float("-inf")]], title="a < b")._repr_html_())
    shades = [float(square.get("fill-opacity")) for square in grid.iter("rect")]
    assert shades[0] > shades[1] > shades[2] == shades[3]
    assert [text.text for text in grid.iter("text")][-2:] == ["−∞", "a < b"]
    assert (
        show.matrices(W_Q=[[1.0, 0.25]])._repr_latex_()
        == r"$$\mathbf{W}_{Q} = \begin{bmatrix} 1 & 0.25 \end{bmatrix}$$"
    )
    assert '<td class="number">−1,234.500</td>' in show.table([(-1234.5,)], ["x"])._repr_html_()
    with mpl.rc_context():  # other tests draw too
        drawn = show.lines([0, 1], {"y": [0, 1]})._repr_html_()
    assert "currentColor" in drawn
    assert show.INK not in drawn
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        show.run("clearhead mask 'causal()' --n 3", lines=4)
    assert out.getvalue().splitlines()[0] == "$ clearhead mask 'causal()' --n 3"
    assert out.getvalue().splitlines()[-1].startswith("… ")


def test_terminal_html_keeps_colors_and_closes_its_spans(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    show = importlib.import_module("plotting")
    markup = show.terminal_html("a < b \x1b[38;2;1;2;3m\x1b[48;2;4;5;6mx\x1b[0m \x1b[1my\x1b[0m")
    assert markup == (
        'a &lt; b <span style="color: rgb(1, 2, 3)"><span style="background: rgb(4, 5, 6)">x</span></span> y'
    )


def test_heat_with_small_squares_shows_a_color_scale(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    show = importlib.import_module("plotting")
    from xml.etree import ElementTree

    def texts(values, side):
        grid = ElementTree.fromstring(show.heat(values, side=side)._repr_html_())
        return [text.text for text in grid.iter("text")]

    assert texts([[2.0, 1.0]], 12)[-3:] == ["0.00", "1.00", "2.00"]
    assert texts([[2.0, -1.0]], 12)[-3:] == ["−2.00", "0.00", "2.00"]
    assert texts([[2.0, 1.0]], 40)[-2:] == ["2.00", "1.00"]
    assert texts([[1.0, -0.001]], 40)[-2:] == ["1.00", "0.00"]


def test_downloaded_notebooks_contain_the_modules_and_files_that_pages_read(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    notebooks = importlib.import_module("notebooks")
    modules, folders = set(), set()
    for page in pages():
        for node in ast.walk(ast.parse("\n".join(page.cells))):
            if isinstance(node, ast.Import):
                modules |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "resource":
                folders.add(ast.literal_eval(node.args[0]).partition("/")[0])
    assert {f"{name}.py" for name in modules if (DOCS / f"{name}.py").exists()} <= set(notebooks.MODULES)
    assert folders <= set(notebooks.FOLDERS)


def test_extensions_of_the_site_are_declared_in_the_docs_extra():
    tree = ast.parse((DOCS / "conf.py").read_text(encoding="utf-8"))
    settings = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("extensions", "html_theme")
    }
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[><=\[;]", line)[0] for line in project["optional-dependencies"]["docs"]}
    installed = [name for name in settings["extensions"] if not (DOCS / f"{name}.py").exists()]
    assert len(installed) >= 3
    assert {re.sub(r"[._]", "-", name) for name in [*installed, settings["html_theme"]]} <= declared
