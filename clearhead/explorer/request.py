"""The actions of the explorer by name, the models they use, and the context in which a request runs."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, TypeAlias, get_type_hints

import torch

from clearhead import hub
from clearhead._core.validation import Range, did_you_mean, lookup
from clearhead.config import Validated, decode_variant
from clearhead.errors import ConfigError
from clearhead.explorer.worker_pool import ServerLimits

Seed: TypeAlias = Annotated[int, Range(ge=0, le=(1 << 63) - 1)]  # what torch.Generator accepts

# All actions that the page may request, by the module that defines them. An action is a function of a request, which is
# the frozen value that its first argument is annotated with, and of the request's context.
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


class Cancelled(Exception):
    """The client of the running request has disconnected."""


def raise_if_set(stop: threading.Event) -> None:
    """Raise `Cancelled` if the running request was cancelled."""
    if stop.is_set():
        raise Cancelled


class ModelRegistry:
    """The models named on the command line, each loaded once. Requests can use these models only.

    Args:
        models: Names of the models.
        limits: Fields of `ServerLimits`.
        device: Device of the models.
        dtype: Dtype of the models.
    """

    def __init__(
        self, models: Sequence[str], limits: Mapping[str, Any], *, device: str = "cpu", dtype: str = "float32"
    ) -> None:
        self.names = list(models)
        self.limits = ServerLimits(**limits)
        self._load = cache(partial(hub.pipeline, device=device, dtype=getattr(torch, dtype)))

    def load_all(self) -> None:
        """Load all models and import all panels, so that the first request does not wait for them."""
        for name in self.names:
            self._load(name)
        for panel in _PANELS:
            importlib.import_module(f"clearhead.explorer.{panel}")

    def model(self, name: str) -> Any:
        """Return a model by its name.

        Raises:
            ConfigError: The page has no model of this name.
        """
        if name not in self.names:
            raise ConfigError(f"unknown model {name[:80]!r}; {did_you_mean(name, self.names)}")
        return self._load(name)

    def action(self, name: str) -> Callable[[dict[str, Any], RequestContext], Any]:
        """Return an action, as a function of a request's JSON object and its context."""
        panel = lookup(name, ACTIONS, "there is no action")
        function = getattr(importlib.import_module(f"clearhead.explorer.{panel}"), name)
        kind, *_ = get_type_hints(function).values()
        # Decoding checks the name, the type and the range of every field.
        return lambda fields, context: function(
            decode_variant({**fields, "type": kind.__name__}, (kind,), "this request"), context
        )


class RequestContext:
    """What an action can use besides its request: the models, progress reports and cancellation."""

    def __init__(self, registry: ModelRegistry, send: Callable[[str, Any], None], stop: threading.Event) -> None:
        self.registry = registry
        self._send = send
        self._stop = stop

    def checkpoint(self, completed: int = 0, total: int = 0, label: str = "") -> None:
        """Raise `Cancelled` if the client has disconnected; report the progress if `total` is given."""
        raise_if_set(self._stop)
        if total:
            self._send("progress", {"completed": completed, "total": total, "label": label})

    def send_part(self, value: Any) -> None:
        """Send a partial result."""
        self.checkpoint()
        self._send("part", value)
