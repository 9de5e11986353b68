"""How the site is built: `make docs`. Every cell of every page is run by the build, and a warning stops it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from clearhead._version import __version__  # noqa: E402 (the tree that is documented, not one that is installed)

# The cells run in kernels of their own, which see this tree and the helpers beside this file.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE)])
os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "80", "PYTHONWARNINGS": "ignore::UserWarning:torch"}

# A profile of their own: nobody's start-up files run in them, and that they speak over loopback is no news.
profile = HERE / "_build" / "ipython" / "profile_default"
profile.mkdir(parents=True, exist_ok=True)
(profile / "ipython_kernel_config.py").write_text('get_config().IPKernelApp.log_level = "ERROR"\n', encoding="utf-8")
os.environ["IPYTHONDIR"] = str(profile.parent)

project = "clearhead"
author = "the clearhead authors"
copyright = "the clearhead authors, Apache-2.0"
version = release = __version__

extensions = ["myst_nb", "mathml", "notebooks", "api_reference"]
exclude_patterns = ["_build", "results", "pictures", "README.md", "**/README.md"]
html_math_renderer = "mathml"
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3

nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_show_tb = True  # a cell that fails is a warning, which stops the build once all pages have been tried
nb_merge_streams = True

html_theme = "furo"
html_title = f"clearhead {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"sidebar_hide_name": False, "navigation_with_keys": True}
pygments_style = "tango"
pygments_dark_style = "github-dark"
