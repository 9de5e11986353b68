"""Offer pages as notebooks: copy each executed page with cells into the site and link to it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

NOTEBOOKS_FOLDER = "notebooks"
MODULES = ("plotting.py", "diagrams.py", "tiny_models.py")
FOLDERS = ("results", "sounds", "book", "examples")  # in docs/ or in the root of the checkout


def _link(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Insert a link to the notebook below the title of a page."""
    if doctree is not None and _executed(app, page).exists():
        root = "../" * page.count("/")
        name = Path(page).name
        href = f"{root}{NOTEBOOKS_FOLDER}/{name}.ipynb"
        archive = f"{root}{NOTEBOOKS_FOLDER}.zip"
        link = (
            f'<p class="as-notebook"><a href="{href}" download>This page as a notebook</a>; '
            f'<a href="{archive}" download>all notebooks with the files that they read</a></p>'
        )
        context["body"] = context["body"].replace("</h1>", f"</h1>\n{link}", 1)


def _executed(app: Sphinx, page: str) -> Path:
    """Return the path of the executed notebook of a page."""
    return Path(app.outdir).parent / "jupyter_execute" / f"{page}.ipynb"


def _copy(app: Sphinx, error: Exception | None) -> None:
    """Copy the notebooks with the modules and files that they read, and pack all of them into one archive."""
    if error is not None or app.builder.name != "html":
        return
    folder = Path(app.outdir) / NOTEBOOKS_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for module in MODULES:
        shutil.copy(Path(app.srcdir) / module, folder)
    for name in FOLDERS:
        source = Path(app.srcdir) / name
        source = source if source.exists() else Path(app.srcdir).parent / name
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for page in app.env.found_docs:
        notebook = _executed(app, page)
        if notebook.exists():
            shutil.copy(notebook, folder)
    shutil.make_archive(str(folder), "zip", folder)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the event handlers with Sphinx."""
    app.connect("html-page-context", _link)
    app.connect("build-finished", _copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
