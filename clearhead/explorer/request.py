"""The actions of the explorer by name, the models they use, and the context in which a request runs."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import torch

from clearhead import hub
from clearhead._core.json_types import JSONObject
from clearhead._core.validation import Range, did_you_mean, lookup, require
from clearhead.config import Validated, decode_variant
from clearhead.errors import ConfigError
from clearhead.explorer.worker_pool import ServerLimits

Seed: TypeAlias = Annotated[int, Range(ge=0, le=(1 << 63) - 1)]  # what torch.Generator accepts

# All actions that the page may request, by the module that defines them; they are imported when they are first used.
_PANELS = {
    "model_panel": ("models", "next_token", "attention", "walkthrough", "beam_search", "report_page"),
    "intervention_panel": ("intervene",),
    "digit_panel": ("classify_digit",),
    "mask_panel": ("mask", "mask_catalogue"),
    "by_hand_panel": ("attention_by_hand",),
    "cost_panel": ("cost", "cost_growth", "largest_batch"),
    "claims_panel": ("claims", "run_claim", "problems", "worksheet", "grade"),
}
ACTIONS = {action: panel for panel, actions in _PANELS.items() for action in actions}


@dataclass(frozen=True)
class EmptyRequest(Validated):
    """A request without fields."""


class Cancelled(Exception):  # noqa: N818 (not an error: the client left)
    """The client of the running request has disconnected."""


def raise_if_set(stop: threading.Event) -> None:
    """Raise `Cancelled` if the running request was cancelled."""
    if stop.is_set():
        raise Cancelled


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
        self.names = list(models)
        self.limits = limits
        self._load = cache(partial(hub.pipeline, device=device, dtype=getattr(torch, dtype)))

    def load_all(self) -> None:
        """Load all models and import all panels, so that the first request does not wait for them."""
        for name in self.names:
            self._load(name)
        for panel in _PANELS:
            importlib.import_module(f"clearhead.explorer.{panel}")

    def model(self, name: str) -> hub.Pipeline:
        """Return a model by its name.

        Raises:
            ConfigError: The page has no model of this name.
        """
        if name not in self.names:
            raise ConfigError(f"unknown model {name[:80]!r}; {did_you_mean(name, self.names)}")
        return self._load(name)

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
        request = decode_variant({**fields, "type": self.request_type.__name__}, (self.request_type,), "this request")
        return self.function(request, context)


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
