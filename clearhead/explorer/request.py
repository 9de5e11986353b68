"""The actions of the explorer by name, the models they use, and the context in which a request runs."""

from __future__ import annotations

import contextlib
import importlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import torch

from clearhead import hub
from clearhead._core.json_types import JSONObject
from clearhead._core.validation import Range, did_you_mean, lookup, require
from clearhead.config import Validated, decode_variant
from clearhead.errors import ClearheadError, ConfigError, ParseError
from clearhead.explorer.worker_pool import ServerLimits
from clearhead.training import checkpoint
from clearhead.training.recipe import load_checkpoint_at

Seed: TypeAlias = Annotated[int, Range(ge=0, le=(1 << 63) - 1)]  # what torch.Generator accepts

_MAX_CHECKPOINTS = 3  # of all runs, that a worker keeps loaded

# All actions that the page may request, by the module that defines them; they are imported when they are first used.
_PANELS = {
    "run_panel": ("models", "run"),
    "view_panel": ("attention", "walkthrough", "walkthrough_page", "report_page"),
    "beam_panel": ("beam_search",),
    "intervention_panel": ("intervene",),
    "causal_panel": ("causal_map",),
    "interpret_panel": ("logit_lens", "explain_token", "patching_grid", "induction", "neurons"),
    "tour_panel": ("tour",),
    "comparison_panel": (
        "compare_outputs",
        "compare_attention",
        "compare_lenses",
        "compare_streams",
        "compare_ablations",
    ),
    "training_panel": ("training_log", "training_frame"),
    "digit_panel": ("classify_digit",),
    "speech_panel": ("listen",),
    "mask_panel": ("mask", "mask_catalogue"),
    "by_hand_panel": ("attention_by_hand",),
    "cost_panel": ("cost", "cost_growth", "largest_batch"),
    "claims_panel": ("claims", "run_claim", "problems", "worksheet", "grade"),
}
ACTIONS = {action: panel for panel, actions in _PANELS.items() for action in actions}


@dataclass(frozen=True)
class EmptyRequest(Validated):
    """A request without fields."""


class FieldError(ConfigError):
    """An invalid field of a request. `field` is its name; `column` is the place of the mistake in an expression."""

    def __init__(self, field: str, message: str, column: int | None = None) -> None:
        super().__init__(message)
        self.field, self.column = field, column


@contextlib.contextmanager
def field_errors(field: str) -> Iterator[None]:
    """Assign the errors of a block to a field of the request."""
    try:
        yield
    except ClearheadError as error:
        column = error.column if isinstance(error, ParseError | FieldError) else None
        raise FieldError(field, str(error).partition("\n")[0], column) from error


class Cancelled(Exception):  # noqa: N818 (not an error: the client left)
    """The client of the running request has disconnected."""


def raise_if_set(stop: threading.Event) -> None:
    """Raise `Cancelled` if the running request was cancelled."""
    if stop.is_set():
        raise Cancelled


def short_names(models: Sequence[str]) -> dict[str, str]:
    """Return the models by unique short names: a file or folder is called by the last part of its path.

    Args:
        models: Names and paths, as for `ch.pipeline`.
    """
    sources: dict[str, str] = {}
    for model in models:
        parts = model.removeprefix("hf:").removesuffix(".gguf").rstrip("/").split("/")
        candidates = ("/".join(parts[-n:]) for n in range(1, len(parts) + 1))
        sources[next((name for name in candidates if name not in sources), model)] = model
    return sources


class ModelRegistry:
    """The models named on the command line, each loaded once. Requests can use these models only.

    Args:
        models: Names of the models.
        limits: Resource limits of the server.
        device: Device of the models.
        dtype: Dtype of the models.
    """

    def __init__(
        self, models: Sequence[str], limits: ServerLimits, *, device: str = "cpu", dtype: str = "float32"
    ) -> None:
        self.sources = short_names(models)  # the name or path that each model is loaded by
        self.limits = limits
        self._load = cache(partial(hub.pipeline, device=device, dtype=getattr(torch, dtype)))
        self._pipelines: dict[str, hub.Pipeline] = {}
        self._placement = {"device": device, "dtype": getattr(torch, dtype)}
        self._checkpoints: OrderedDict[str, hub.Pipeline] = OrderedDict()  # the least recently used one first

    @property
    def names(self) -> list[str]:
        """The names of the models on the page."""
        return list(self.sources)

    def load_all(self) -> None:
        """Load all models and import all panels, so that the first request does not wait for them."""
        for name in self.names:
            self.model(name)
        for panel in _PANELS:
            importlib.import_module(f"clearhead.explorer.{panel}")

    def model(self, name: str) -> hub.Pipeline:
        """Return a model by its name, or a checkpoint of a run by the name of the run and a step: "letters@500".

        Raises:
            ConfigError: The page has no model of this name.
            StorageError: The run has no checkpoint of this step.
        """
        run, _, step = name.rpartition("@")
        if name not in self.names and run in self.names and re.fullmatch(r"\d{1,12}", step):
            return self._checkpoint(run, int(step))
        if name not in self.names:
            raise ConfigError(f"unknown model {name[:80]!r}; {did_you_mean(name, self.names)}")
        if name not in self._pipelines:  # messages contain the short name, not a path
            self._pipelines[name] = replace(self._load(self.sources[name]), name=name)
        return self._pipelines[name]

    def run_folder(self, name: str) -> Path | None:
        """Return the folder of the training run that a model of the page comes from, or None."""
        folder = Path(self.sources[name])
        is_run = name not in hub.names() and (folder / "train.toml").is_file()
        return folder if is_run and checkpoint.steps(folder) else None

    def checkpoint_steps(self, name: str) -> list[int]:
        """Return the steps of the checkpoints of a run that exist now, in ascending order; empty for other models."""
        folder = self.run_folder(name)
        return [] if folder is None else sorted(checkpoint.steps(folder))

    def _checkpoint(self, run: str, step: int) -> hub.Pipeline:
        """Return the model of a run at a step; a few checkpoints stay loaded."""
        name, folder = f"{run}@{step}", self.run_folder(run)
        if folder is None:
            raise ConfigError(f"{run} has no checkpoints; it is not the folder of a training run")
        if name not in self._checkpoints:
            model = load_checkpoint_at(folder, step).to(**self._placement)
            self._checkpoints[name] = replace(self.model(run), name=name, model=model)
        self._checkpoints.move_to_end(name)
        while len(self._checkpoints) > _MAX_CHECKPOINTS:
            self._checkpoints.popitem(last=False)
        return self._checkpoints[name]

    def run(self, name: str, fields: JSONObject, context: RequestContext) -> JSONObject:
        """Run an action.

        Args:
            name: Name of the action.
            fields: The fields of its request; decoding checks the name, the type and the range of each.
            context: The context of the request.

        Raises:
            ConfigError: The action does not exist, or a field is invalid.
        """
        panel = lookup(name, ACTIONS, "unknown action")
        importlib.import_module(f"clearhead.explorer.{panel}")  # registers its actions
        return _REGISTERED[name].run(fields, context)


class RequestContext:
    """What an action can use besides its request: the models, progress reports and cancellation."""

    def __init__(self, registry: ModelRegistry, send: Callable[[str, object], None], stop: threading.Event) -> None:
        self.registry = registry
        self._send = send
        self._stop = stop

    def checkpoint(self, completed: int = 0, total: int = 0, label: str = "") -> None:
        """Raise `Cancelled` if the client has disconnected; report the progress if `total` is given."""
        raise_if_set(self._stop)
        if total:
            self._send("progress", {"completed": completed, "total": total, "label": label})

    def send_part(self, value: object) -> None:
        """Send a partial result."""
        self.checkpoint()
        self._send("part", value)


# ---------------------------------------------------------------------- registry of actions

R = TypeVar("R", bound=Validated)
Run: TypeAlias = Callable[[R, RequestContext], JSONObject]


@dataclass(frozen=True)
class Action(Generic[R]):
    """A function of the page, and the type of its requests."""

    request_type: type[R]
    function: Run[R]

    def run(self, fields: JSONObject, context: RequestContext) -> JSONObject:
        """Decode a request and call the function."""
        name = self.request_type.__name__
        try:
            request = decode_variant({**fields, "type": name}, (self.request_type,), "this request")
        except ConfigError as error:
            message = _OWNERS.sub("", str(error)).replace(" or None", "").replace(" is None;", " is empty;")
            words = set(re.findall(r"\w+", message.partition(";")[0]))
            raise FieldError(next((key for key in fields if key in words), ""), message) from error
        return self.function(request, context)


# Prefixes of messages that name classes, such as "this request: RunRequest: ".
_OWNERS = re.compile(r"^this request: |\b\w+(?:Request|Spec)(?:\[\d+\])?[:.] ?")
_REGISTERED: dict[str, Action[Any]] = {}


def action(request_type: type[R]) -> Callable[[Run[R]], Run[R]]:
    """Decorator: register a function as an action whose requests have this type.

    Raises:
        ConfigError: The action is not listed in the panel that defines it.
    """

    def register(function: Run[R]) -> Run[R]:
        name, panel = function.__name__, function.__module__.rpartition(".")[2]
        require(ACTIONS.get(name) == panel, f"the action {name} is not listed as one of {panel}")
        _REGISTERED[name] = Action(request_type, function)
        return function

    return register
