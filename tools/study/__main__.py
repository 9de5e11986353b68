"""Run the study: `python -m tools.study`. It takes minutes on a GPU, and hours on a CPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from clearhead.course.claims.study import Study
from clearhead.errors import ClearheadError
from tools.study.networks import NETWORKS
from tools.study.plan import Settings
from tools.study.run import run


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.study", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="SVHN: a folder, or an npz file")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write, after every training")
    parser.add_argument("--seconds", type=float, default=210.0, help="time limit for the whole study")
    parser.add_argument("--continue", type=Path, dest="begun", help="a file of this study to resume")
    parser.add_argument("--only", nargs="+", default=[], choices=list(NETWORKS), help="train only these networks")
    parser.add_argument("--device", help="cuda or cpu (default: a GPU if available)")
    parser.add_argument("--eager", action="store_true", help="do not capture updates as CUDA graphs")
    options = parser.parse_args(arguments)
    try:
        study = run(
            options.data,
            options.out,
            Settings(seconds=options.seconds, tuning_steps=min(600, max(20, int(3 * options.seconds)))),
            begun=Study.read(options.begun) if options.begun else None,
            only=options.only,
            device=options.device,
            captured=not options.eager,
            say=lambda line: print(line, flush=True),
        )
    except ClearheadError as error:
        print(f"study: {error}", file=sys.stderr)
        return 1
    print(f"{len(study.rows)} trainings written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
