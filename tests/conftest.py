"""Shared fixtures and options: fixed seeds, one thread, hypothesis without deadlines, and stress settings.

    pytest --shuffle 7 --threads 2 --misalign tests/models

`--shuffle SEED` runs files, and the tests within each file, in random order. `--threads N` sets torch's threads.
`--misalign` moves the parameters of every loaded model to addresses that are not multiples of 64, where torch's kernels
may take another path and round differently. The suite must pass under any combination of them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.command_line import runner
from tests.support.misalign import misalign
from tests.support.ordering import shuffle_by_file

ONEDNN_ISA = dict.fromkeys(("default", "avx2"), "AVX512_CORE")
"""Instruction sets of oneDNN without AMX; bfloat16 LSTMs need AVX-512 where the processor has it."""

if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # The key of torch.compile's cache does not contain the capability: code for another one would fail to build.
    compile_cache = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", compile_cache)
    # The capability restricts torch's own kernels; oneDNN's are chosen by the processor. On one with AMX, torch's
    # bfloat16 attention would pack matrices for kernels of AVX-512, which the capability excludes, and raise.
    if capability in ONEDNN_ISA:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", ONEDNN_ISA[capability])

settings.register_profile("clearhead", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("clearhead")


JAXTYPED = ("attention", "analysis", "data", "generation", "hub", "masks", "models", "nn", "ops", "training")
"""Packages with shapes in their signatures: their tests run with jaxtyping's checks, which cost half as much again."""

UNTYPED = (
    *("analysis/cost", "analysis/checks", "attention/sparse/test_plan.py"),
    *(f"analysis/interp/test_{name}.py" for name in ("attribution", "logit_lens", "patching")),
    *("generation/engine/test_continuous_batching.py", "generation/engine/test_engine.py", "generation/test_models.py"),
    *("hub/test_beam_search.py", "hub/test_export.py", "hub/test_families.py"),
    *("hub/test_family_round_trip.py", "hub/test_published.py", "hub/test_transformers_attention.py"),
    *("masks/test_count.py", "masks/test_parse.py", "models/test_cached_decoding.py", "models/test_options.py"),
    *("training/test_resume.py", "training/test_trainer.py"),
)
"""Parts of these packages that call the same few signatures so often that the checks would double their time. Other
files cover those signatures."""


TESTS = Path(__file__).parent


def pytest_addoption(parser):
    group = parser.getgroup("clearhead")
    group.addoption("--shuffle", type=int, metavar="SEED", help="random order of files, and of tests within a file")
    group.addoption("--threads", type=int, default=1, metavar="N", help="threads of torch (default 1)")
    group.addoption("--misalign", action="store_true", help="move loaded parameters to misaligned memory")


def pytest_ignore_collect(collection_path, config):
    """Do not import packages of plain tests in the run with shape checks, which deselects them."""
    is_typed_run = config.getoption("jaxtyping_packages") and "plain" in config.getoption("markexpr")
    return True if is_typed_run and collection_path.parent == TESTS and collection_path.name not in JAXTYPED else None


def pytest_collection_finish():
    # Imported modules live until the end, so the garbage collector need not traverse their million objects repeatedly.
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # otherwise libraries report frozen objects as leaks at exit


def pytest_collection_modifyitems(config, items):
    for item in items:
        path = item.path.relative_to(TESTS)
        if path.parts[0] not in JAXTYPED or path.as_posix().startswith(UNTYPED):
            item.add_marker("plain")
    seed = config.getoption("shuffle")
    if seed is not None:
        items[:] = shuffle_by_file(items, seed)


@pytest.fixture(scope="session", autouse=True)
def _threads(request):
    # One by default: tensors in tests are tiny, and two threads would mostly wait for each other on a busy machine.
    torch.set_num_threads(request.config.getoption("threads"))


@pytest.fixture(autouse=True)
def _misaligned_parameters(request, monkeypatch):
    """With `--misalign`, move parameters that `load_state_dict(assign=True)` assigned to misaligned memory."""
    # Tests that measure memory expect mapped parameters to take none.
    is_exempt = any(request.node.get_closest_marker(name) for name in ("measured", "fixed_memory"))
    if request.config.getoption("misalign") and not is_exempt:
        load_state_dict = torch.nn.Module.load_state_dict

        def load_misaligned(module, state_dict, strict=True, assign=False):
            result = load_state_dict(module, state_dict, strict=strict, assign=assign)
            if assign:
                misalign(module)
            return result

        monkeypatch.setattr(torch.nn.Module, "load_state_dict", load_misaligned)


@pytest.fixture(scope="session", autouse=True)
def _no_fsync():
    # No test cuts the power, and a training run writes its files forty times.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True)
def _signals():
    """Reset signal handlers, because a shell may start its background jobs with Ctrl-C ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def small_disk(monkeypatch):
    """Limit the size of files within `with small_disk(n_bytes):`; writing more fails as on a full disk."""
    # Otherwise Python would write truncated bytecode files, here or in a child, and fail on them later.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    resource = pytest.importorskip("resource", reason="resource limits need POSIX")

    @contextlib.contextmanager
    def limited(size: int):
        before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))

    return limited


@pytest.fixture
def cli(monkeypatch, capsys):
    """Run `clearhead` with the given arguments."""
    from clearhead.cli import main

    return runner(main, "clearhead", monkeypatch, capsys)


@pytest.fixture
def benchmarks_cli(monkeypatch, capsys):
    """Run `python -m benchmarks` with the given arguments."""
    from benchmarks.cli import main

    return runner(main, "benchmarks", monkeypatch, capsys)
