"""Chapters as notebooks: each page with cells is copied, as the build ran it, beside the site, with a link to it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

FOLDER = "notebooks"


def _link(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if doctree is not None and _executed(app, page).exists():
        up = "../" * page.count("/")
        name = Path(page).name
        link = f'<p class="as-notebook"><a href="{up}{FOLDER}/{name}.ipynb" download>This page as a notebook</a></p>'
        context["body"] = context["body"].replace("</h1>", f"</h1>\n{link}", 1)


def _executed(app: Sphinx, page: str) -> Path:
    return Path(app.outdir).parent / "jupyter_execute" / f"{page}.ipynb"


def _copy(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    folder = Path(app.outdir) / FOLDER
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(app.srcdir) / "plotting.py", folder)
    shutil.copytree(Path(app.srcdir) / "results", folder / "results", dirs_exist_ok=True)
    for page in app.env.found_docs:
        if (made := _executed(app, page)).exists():
            shutil.copy(made, folder)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", _link)
    app.connect("build-finished", _copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
