"""Let timm and transformers be imported with a torch build that does not match torchvision's, for example a CPU build.

torchvision loads its compiled operators only with the torch build that they were compiled for. Without them its import
fails when it registers shape functions for two of them. The reference models that the tests use never call these
operators, so declaring their names is enough. `python tools/baselines.py` (part of `make setup`) tries the import and,
only if it fails, installs a startup hook into this environment that declares the names.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

HOOK = '''"""Declare torchvision's operators if its build does not match this torch (written by tools/baselines.py)."""

import sys

FIRST_USERS = ("torchvision._autograd_registrations", "torchvision._meta_registrations")


class OperatorDeclarations:
    def find_spec(self, name, path=None, target=None):
        # torchvision.extension was imported before these, so real operators are registered by now if they load.
        if name in FIRST_USERS:
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, operator):
                    self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.torchvision_operator_declarations = self  # declarations last as long as the library object


sys.meta_path.insert(0, OperatorDeclarations())
'''


def can_import(*modules: str) -> bool:
    """Return whether a separate process can import these modules."""
    process = subprocess.run([sys.executable, "-c", f"import {', '.join(modules)}"], capture_output=True, check=False)
    return process.returncode == 0


def main() -> None:
    """Install the hook if torchvision cannot be imported without it, then check the reference libraries."""
    folder = Path(sysconfig.get_paths()["purelib"])
    hook = folder / "torchvision_names.py"
    startup_file = folder / "torchvision_names.pth"
    startup_file.unlink(missing_ok=True)
    if not can_import("torchvision"):
        hook.write_text(HOOK, encoding="utf-8")
        startup_file.write_text("import torchvision_names\n", encoding="utf-8")
    if not can_import("timm", "transformers.models.gpt2.modeling_gpt2"):
        sys.exit("cannot import timm or transformers: their versions do not match this torch; see constraints.txt")


if __name__ == "__main__":
    main()
