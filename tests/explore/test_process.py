"""A process that computes: whatever happens in a run, its last event says so, and memory has an end."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from clearhead.errors import ConfigError, ParseError
from clearhead.explore.desk import Limits
from clearhead.explore.process import answer
from clearhead.explore.run import GivenUp


def told(act, stop=None):
    """The events of one job whose action is `act(ask, run)`."""
    out = io.BytesIO()
    shelf = SimpleNamespace(limits=Limits(), action=lambda name: act)
    answer({"action": "x", "ask": {"n": 1}}, shelf, out, stop or threading.Event())
    found, text = [], out.getvalue()
    while text:
        head, _, text = text.partition(b"\n")
        kind, length = head.split()
        found.append((kind.decode(), json.loads(text[: int(length)])))
        text = text[int(length) :]
    return found


def raising(error):
    def act(ask, run):
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConfigError("n is 1; expected 2\nand more"), "n is 1; expected 2"),
        (GivenUp(), "nobody waits"),
        (MemoryError(), "needs more than the 4 GiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), "needs more than the 4 GiB"),
        (
            ZeroDivisionError("secret path"),
            "this run failed (ZeroDivisionError); the terminal of the server says where",
        ),
    ],
)
def test_errors_are_one_sentence(error, says):
    ((kind, found),) = told(raising(error))
    assert kind == "error"
    assert says in found["error"]
    assert "\n" not in found["error"]


def test_where_an_expression_is_wrong():
    assert told(raising(ParseError("column 4: no", column=4))) == [("error", {"error": "column 4: no", "column": 4})]


def test_progress_and_what_cannot_be_written():
    def act(ask, run):
        run.step(1, 2, "half")
        run.part(ask)
        return {"value": float("nan")}

    kinds = told(act)
    assert [kind for kind, _ in kinds] == ["progress", "part", "error"]
    assert kinds[1][1] == {"n": 1}


def test_a_run_that_nobody_waits_for_stops_at_its_next_step():
    stop = threading.Event()

    def act(ask, run):
        stop.set()
        run.step()
        raise AssertionError("it went on")

    assert "nobody waits" in told(act, stop)[-1][1]["error"]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded by what Linux offers")
def test_memory_has_an_end():
    lines = (
        "import torch",
        "from clearhead.explore.process import bound_memory",
        "bound_memory(64 << 20)",
        "print(torch.ones(1 << 20).sum().item())",
        "try: torch.ones(1 << 28)",
        "except RuntimeError as error: print(str(error))",
    )
    found = subprocess.run((sys.executable, "-c", "\n".join(lines)), capture_output=True, text=True, check=True).stdout
    assert found.startswith("1048576.0")
    assert "can't allocate memory" in found
