"""Lets timm and transformers be imported beside a torch of another build than torchvision's, a CPU one say.

torchvision loads its compiled operators only beside the very build they were made for, and without them its import
stops at one that it wants to describe. No peer that is used here calls it, so it is enough that it exists by name.
`python tools/peers.py` (a part of `make setup`) tries, and only where the import fails puts a hook into this
environment that gives the names before torchvision asks for them.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

HOOK = '''"""Names for torchvision's operators, whose build does not fit this torch's (by tools/peers.py)."""

import sys


class Names:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.kept = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.kept.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.torchvision_names = self  # alive as long as the process


sys.meta_path.insert(0, Names())
'''


def imports(*modules: str) -> bool:
    """Whether modules can be imported, in a process of their own."""
    done = subprocess.run([sys.executable, "-c", f"import {', '.join(modules)}"], capture_output=True, check=False)
    return done.returncode == 0


def main() -> None:
    """Try torchvision without the hook, put the hook in where that fails, and try the peers."""
    folder = Path(sysconfig.get_paths()["purelib"])
    hook, line = folder / "torchvision_names.py", folder / "torchvision_names.pth"
    line.unlink(missing_ok=True)
    if not imports("torchvision"):
        hook.write_text(HOOK, encoding="utf-8")
        line.write_text("import torchvision_names\n", encoding="utf-8")
    if not imports("timm", "transformers.models.gpt2.modeling_gpt2"):
        sys.exit("timm or transformers cannot be imported: their versions do not fit this torch; see constraints.txt")


if __name__ == "__main__":
    main()
