"""Sphinx configuration (`make docs`). The build runs every cell of every page and treats warnings as errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from clearhead._version import __version__  # noqa: E402 (from this checkout, not an installed package)

# Cells run in separate kernels, which import this checkout and the helpers in this folder.
os.environ["PYTHONPATH"] = os.pathsep.join([str(DOCS.parent), str(DOCS)])
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "80",
    "PYTHONWARNINGS": "ignore::UserWarning:torch,ignore:IProgress not found",
}

# A separate profile keeps out the user's start-up files and silences the notice about loopback connections.
profile = DOCS / "_build" / "ipython" / "profile_default"
profile.mkdir(parents=True, exist_ok=True)
(profile / "ipython_kernel_config.py").write_text('get_config().IPKernelApp.log_level = "ERROR"\n', encoding="utf-8")
os.environ["IPYTHONDIR"] = str(profile.parent)

project = "clearhead"
author = "the clearhead authors"
copyright = "the clearhead authors, Apache-2.0"
version = release = __version__

extensions = ["myst_nb", "sphinx_design", "sphinxcontrib.bibtex", "mathml", "notebooks", "api_reference", "crosslinks"]
bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "plain"
bibtex_reference_style = "author_year"
exclude_patterns = ["_build", "results", "pictures", "README.md", "**/README.md"]
html_math_renderer = "mathml"
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3

nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_show_tb = True  # a failing cell is a warning; the build fails after all pages have run
nb_merge_streams = True

smartquotes_action = "qe"  # quotes and ellipses, but no dashes: "--seed" in a sentence is an option

html_theme = "furo"
html_title = f"clearhead {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_use_index = False  # the pages of the reference list every name; Sphinx's own index would be empty
html_show_sphinx = False
html_theme_options = {"sidebar_hide_name": False, "navigation_with_keys": True}
pygments_style = "default"  # a contrast of at least 4.5
pygments_dark_style = "github-dark"
