"""Offer pages as notebooks: copy each executed page with cells into the site and link to it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

NOTEBOOKS_FOLDER = "notebooks"


def _link(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Insert a link to the notebook below the title of a page."""
    if doctree is not None and _executed(app, page).exists():
        root = "../" * page.count("/")
        name = Path(page).name
        href = f"{root}{NOTEBOOKS_FOLDER}/{name}.ipynb"
        link = f'<p class="as-notebook"><a href="{href}" download>This page as a notebook</a></p>'
        context["body"] = context["body"].replace("</h1>", f"</h1>\n{link}", 1)


def _executed(app: Sphinx, page: str) -> Path:
    """Return the path of the executed notebook of a page."""
    return Path(app.outdir).parent / "jupyter_execute" / f"{page}.ipynb"


def _copy(app: Sphinx, error: Exception | None) -> None:
    """Copy the notebooks, with the helper module and the results that they read."""
    if error is not None or app.builder.name != "html":
        return
    folder = Path(app.outdir) / NOTEBOOKS_FOLDER
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(app.srcdir) / "plotting.py", folder)
    shutil.copytree(Path(app.srcdir) / "results", folder / "results", dirs_exist_ok=True)
    for page in app.env.found_docs:
        notebook = _executed(app, page)
        if notebook.exists():
            shutil.copy(notebook, folder)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the event handlers with Sphinx."""
    app.connect("html-page-context", _link)
    app.connect("build-finished", _copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
