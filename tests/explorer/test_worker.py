"""The worker process: the last event of every request reports its outcome, and memory is limited."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
import threading
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from clearhead._core.validation import PositiveInt
from clearhead.config import Validated
from clearhead.errors import ConfigError, ParseError
from clearhead.explorer.request import ACTIONS, Action, Cancelled, ModelRegistry, RequestContext, action
from clearhead.explorer.worker import ActionCall, run_job
from clearhead.explorer.worker_pool import ServerLimits


def events_of(action, stop=None):
    """The events of one job whose action is `action(request, context)`."""
    out = io.BytesIO()
    registry = SimpleNamespace(limits=ServerLimits(), run=lambda name, fields, context: action(fields, context))
    run_job(ActionCall("x", {"n": 1}), registry, out, stop or threading.Event())
    events, text = [], out.getvalue()
    while text:
        head, _, text = text.partition(b"\n")
        kind, length = head.split()
        events.append((kind.decode(), json.loads(text[: int(length)])))
        text = text[int(length) :]
    return events


def raising(error):
    def action(request, context):
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConfigError("n is 1; expected 2\nand more"), "n is 1; expected 2"),
        (Cancelled(), "cancelled"),
        (MemoryError(), "exceeded the memory limit of 4 GiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), "exceeded the memory limit"),
        (
            ZeroDivisionError("secret path"),
            "the request failed (ZeroDivisionError); the server's terminal shows the traceback",
        ),
    ],
)
def test_run_job_reports_an_error_as_one_sentence(error, message):
    ((kind, event),) = events_of(raising(error))
    assert kind == "error"
    assert message in event["error"]
    assert "\n" not in event["error"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"unknown name {'A' * 5000}", f"unknown name {'A' * 387}…"),
        ("'x' is unknown: remove it, or use Some(…, n=1), which reads it", "'x' is unknown: remove it"),
    ],
)
def test_run_job_shortens_an_error_for_the_page(text, message):
    assert events_of(raising(ConfigError(text))) == [("error", {"error": message})]


def test_run_job_reports_the_column_of_a_parse_error():
    assert events_of(raising(ParseError("column 4: no", column=4))) == [
        ("error", {"error": "column 4: no", "column": 4})
    ]


def test_run_job_sends_progress_and_rejects_nan():
    def action(request, context):
        context.checkpoint(1, 2, "half")
        context.send_part(request)
        return {"value": float("nan")}

    events = events_of(action)
    assert [kind for kind, _ in events] == ["progress", "part", "error"]
    assert events[1][1] == {"n": 1}


def test_run_job_sends_lone_surrogates():
    assert events_of(lambda request, context: {"text": "A\ud800é"}) == [("done", {"text": "A\ud800é"})]


def test_checkpoint_stops_a_cancelled_request():
    stop = threading.Event()

    def action(request, context):
        stop.set()
        context.checkpoint()
        raise AssertionError("the request continued")

    assert "cancelled" in events_of(action, stop)[-1][1]["error"]


@pytest.mark.parametrize("name", ["attention", "walkthrough", "intervene"])
def test_request_cancelled_inside_a_forward_pass_leaves_no_warning(name):
    """The hooks of recorders run also for modules that were stopped before their call."""
    registry = ModelRegistry(["sort-dedup"], ServerLimits())
    run = registry.model("sort-dedup")
    ids = [*run.tokenizer.encode("D A C"), run.tokenizer.bos_id]
    fields = {"model": "sort-dedup", "ids": ids, "n_prompt": len(ids)}
    stop = threading.Event()
    context = RequestContext(registry, lambda kind, value: None, stop)
    calls_left = 0

    def before_module(*_):
        nonlocal calls_left
        calls_left -= 1
        if calls_left == 0:
            raise Cancelled

    handle = torch.nn.modules.module.register_module_forward_pre_hook(before_module)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for n_calls in itertools.count(1, 11):
                calls_left = n_calls
                try:
                    registry.run(name, fields, context)
                    break  # all calls of modules were reached
                except Cancelled:
                    pass
    finally:
        handle.remove()
    assert n_calls > len(list(run.model.modules()))
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.skipif(sys.platform != "linux", reason="resource limits of Linux")
def test_limit_memory_makes_large_allocations_fail():
    lines = (
        "import torch",
        "from clearhead.explorer.worker import limit_memory",
        "limit_memory(64 << 20)",
        "print(torch.ones(1 << 20).sum().item())",
        "try: torch.ones(1 << 28)",
        "except RuntimeError as error: print(str(error))",
    )
    output = subprocess.run((sys.executable, "-c", "\n".join(lines)), capture_output=True, text=True, check=True).stdout
    assert output.startswith("1048576.0")
    assert "can't allocate memory" in output


# ---------------------------------------------------------------------- the registry of actions


@dataclass(frozen=True)
class CountRequest(Validated):
    """A request with one number."""

    n: PositiveInt = 1


def test_action_decodes_the_request_and_checks_its_fields():
    counted = Action(CountRequest, lambda request, context: {"n": request.n + 1})
    context = RequestContext(ModelRegistry([], ServerLimits()), lambda kind, value: None, threading.Event())
    assert counted.run({"n": 4}, context) == {"n": 5}
    assert counted.run({}, context) == {"n": 2}
    with pytest.raises(ConfigError, match="n is 0; expected a whole number of at least 1"):
        counted.run({"n": 0}, context)
    with pytest.raises(ConfigError, match="m"):
        counted.run({"m": 1}, context)


def test_action_that_no_panel_lists_raises_config_error():
    def unlisted(request: CountRequest, context: RequestContext) -> dict[str, object]:
        return {}

    with pytest.raises(ConfigError, match="the action unlisted is not listed as one of test_worker"):
        action(CountRequest)(unlisted)


def test_registry_runs_every_listed_action():
    registry = ModelRegistry([], ServerLimits())
    registry.load_all()
    context = RequestContext(registry, lambda kind, value: None, threading.Event())
    for name in ACTIONS:
        with pytest.raises(ConfigError, match="unknown_field"):
            registry.run(name, {"unknown_field": 1}, context)
    with pytest.raises(ConfigError, match="unknown action 'mak'; did you mean 'mask'"):
        registry.run("mak", {}, context)
