"""Check a machine with a GPU: run the tests that need a GPU, and every benchmark at small sizes.

    python tools/gpu_check.py --out FOLDER --seconds 330

Several checks run at the same time, so timings are not meaningful. The tool prints each result as it arrives, then the
last lines of the failed checks; `checks.log` in the folder has the whole output. The exit status is 1 after a failure.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TAIL = 25  # lines of a failed check that are printed
NEEDS_GPU = "cuda.is_available()"


@dataclass(frozen=True)
class Check:
    """A command, run in the root of the repository."""

    name: str
    command: Sequence[str]


@dataclass(frozen=True)
class Result:
    """Exit status of a check (None if it ran out of time), duration in seconds, and output."""

    check: Check
    status: int | None
    duration: float
    output: str

    @property
    def passed(self) -> bool:
        """Whether the command ended with status 0."""
        return self.status == 0

    def line(self) -> str:
        """Format the result with the last line of the output."""
        verdict = "out of time" if self.status is None else "passed" if self.passed else f"failed ({self.status})"
        lines = self.output.strip().splitlines() or [""]
        return f"{self.check.name:28} {verdict:12} {self.duration:6.1f} s   {lines[-1].strip()[:110]}"


def gpu_tests(root: Path) -> list[str]:
    """Return the test files that check whether a GPU is available, kernels of sparse attention first."""
    paths = [path for path in (root / "tests").rglob("test_*.py") if NEEDS_GPU in path.read_text(encoding="utf-8")]
    names = sorted(path.relative_to(root).as_posix() for path in paths)
    return sorted(names, key=lambda name: "sparse" not in name)


def checks(out: Path) -> list[Check]:
    """Return all checks, the longest first."""
    return [*_tests(ROOT), *_benchmarks(out), *_fuzzing()]


def _tests(root: Path) -> Iterator[Check]:
    options = ("-q", "--tb=short", "-p", "no:cacheprovider")
    for name in gpu_tests(root):
        yield Check(name.removeprefix("tests/"), (sys.executable, "-m", "pytest", *options, name))


def _benchmarks(out: Path) -> Iterator[Check]:
    limited = ("--time-limit", "40")
    commands: dict[str, tuple[str, ...]] = {
        "engine": ("--smoke", "--out", str(out / "engine.json")),
        "sparse": ("--smoke", *limited, "--out", str(out / "sparse.json")),
        "sparse --changing": ("--smoke", *limited, "--out", str(out / "changing.json")),
        "expressions": ("--smoke", *limited, "--out", str(out / "expressions.json")),
        "decode": ("--smoke", *limited, "--out", str(out / "decode.json")),
        "auto": (*limited, "--out", str(out / "auto.json")),
        "tracing": ("--out", str(out / "tracing.json")),
        "attention": ("--repeats", "3"),
        "generation": ("--prompt", "32", "--max-new-tokens", "16"),
        "scaling": ("--longest", "256", "--device", "cuda", "--out", str(out / "scaling.png")),
    }
    for name, options in commands.items():
        yield Check(f"benchmarks {name}", (sys.executable, "-m", "benchmarks", *name.split(), *options))


def _fuzzing() -> Iterator[Check]:
    """Yield the kinds of fuzzing that compute on the device; the others need packages that a GPU machine may lack."""
    for kind in ("attend", "generate"):
        command = (
            sys.executable,
            "tools/fuzz.py",
            "--only",
            kind,
            "--device",
            "cuda",
            "--seconds",
            "30",
            "--seed",
            "1",
        )
        yield Check(f"fuzz {kind}", command)


def run(check: Check, deadline: float) -> Result:
    """Run a check until the deadline; then end its processes."""
    start = time.monotonic()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        check.command,
        cwd=ROOT,
        env=environment | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    status: int | None
    try:
        output, _ = process.communicate(timeout=max(1.0, deadline - start))
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        status = None
    return Result(check, status, time.monotonic() - start, output)


def main() -> int:
    """Run all checks and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of the log and of results files")
    parser.add_argument("--seconds", type=float, default=330.0, help="time limit of all checks together")
    parser.add_argument("--jobs", type=int, default=5, help="number of checks at the same time")
    parser.add_argument("--filter", default="", help="run only checks whose name contains this")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    selected = [check for check in checks(options.out) if options.filter in check.name]
    results = []
    with ThreadPoolExecutor(options.jobs) as pool, (options.out / "checks.log").open("w", encoding="utf-8") as log:
        for future in as_completed([pool.submit(run, check, deadline) for check in selected]):
            results.append(future.result())
            print(results[-1].line(), flush=True)
            log.write(f"{results[-1].line()}\n{results[-1].output}\n\n")
            log.flush()
    failures = [result for result in results if not result.passed]
    for result in failures:
        print(f"\n== {result.check.name}", *result.output.splitlines()[-TAIL:], sep="\n")
    print(f"\n{len(results) - len(failures)} of {len(results)} checks passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
