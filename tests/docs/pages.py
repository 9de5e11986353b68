"""Read the pages of the site: their cells, and the commands, claims and worksheets that they name."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

DOCS = Path(__file__).parents[2] / "docs"
_FENCE = re.compile(r"^(`{3,}|~{3,})(.*?)\n(.*?)^\1[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """One page of the site."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        return str(self.path.relative_to(DOCS))

    @property
    def fences(self) -> list[tuple[str, str]]:
        """The info string and the body of each fence."""
        return [(head.strip(), body) for _, head, body in _FENCE.findall(self.text)]

    @property
    def cells(self) -> list[str]:
        """The code of every cell, without its options."""
        bodies = [body for head, body in self.fences if head.startswith("{code-cell}")]
        return [
            re.sub(r"\A(?:---\n.*?^---\n|(?::[\w-]+:[^\n]*\n)+)", "", body, flags=re.DOTALL | re.MULTILINE)
            for body in bodies
        ]

    @property
    def commands(self) -> list[list[str]]:
        """The words of every `clearhead …` in the prose, in shell fences and in run("…") of a cell."""
        prose = _FENCE.sub("", self.text)
        lines = re.findall(r"`(clearhead [^`]+)`", prose)
        for head, body in self.fences:
            if head in ("sh", "bash", "console"):
                lines += [line.removeprefix("$ ") for line in body.splitlines() if "clearhead " in line[:14]]
        for cell in self.cells:
            for node in ast.walk(ast.parse(cell)):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "run" and node.args:
                    lines.append(ast.literal_eval(node.args[0]))
        return [shlex.split(line, comments=True) for line in lines]


def read_page(name: str) -> Page:
    """Return one page, by its path in docs/."""
    return Page(DOCS / name, (DOCS / name).read_text(encoding="utf-8"))


def pages(folder: str = "") -> list[Page]:
    """Return the pages of a folder of docs/, or all handwritten pages."""
    folders = [folder] if folder else ["book", "guides"]
    return [
        Page(path, path.read_text(encoding="utf-8")) for name in folders for path in sorted((DOCS / name).glob("*.md"))
    ]


@contextlib.contextmanager
def restored_environment() -> Iterator[None]:
    """Restore print options, figure settings and environment variables that a page changes."""
    import matplotlib as mpl

    before, path = dict(os.environ), list(sys.path)
    sys.path.insert(0, str(DOCS))
    try:
        with mpl.rc_context(), torch.random.fork_rng():
            yield
    finally:
        torch.set_printoptions(profile="default")
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(before)


def execute(page: Page) -> dict[str, object]:
    """Run the cells of a page in order, as its kernel would, and render the values of last lines."""
    space: dict[str, object] = {"__name__": "__main__"}
    with restored_environment():
        for i, cell in enumerate(page.cells):
            where = f"{page.name}, cell {i + 1}"
            tree = ast.parse(cell, where)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, where, "exec"), space)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), where, "eval"), space)
                for method in ("_repr_html_", "_repr_latex_", "_repr_markdown_"):
                    if hasattr(value, method):
                        getattr(value, method)()
    return space
