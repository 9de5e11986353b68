"""What an action is handed beside its request: the models by name, a way to tell how far it is, and when to stop."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, get_type_hints

import torch

from clearhead import pretrained
from clearhead.config import Value, decode_choice
from clearhead.errors import ConfigError
from clearhead.explore.desk import Limits
from clearhead.values import chosen, did_you_mean

# Every action that the page may ask for, by the file of this room that has it. An action is a function of a request,
# the frozen value that its first argument is annotated with, and of the run.
_ROOMS = {
    "readings": ("models", "step", "attention", "walk", "beams", "page"),
    "changes": ("change",),
    "digits": ("digit",),
    "masks": ("mask", "gallery"),
    "hand": ("hand",),
    "prices": ("cost", "growth", "fits"),
    "ledger": ("claims", "claim", "sheets", "sheet", "marks"),
}
ACTIONS = {action: room for room, actions in _ROOMS.items() for action in actions}


@dataclass(frozen=True)
class Nothing(Value):
    """A request that asks for nothing in particular."""


class GivenUp(Exception):
    """Nobody waits for this run any more."""


def check(stop: threading.Event) -> None:
    """Stop here if nobody waits for what is being done."""
    if stop.is_set():
        raise GivenUp


class Shelf:
    """The models that the command line named, loaded once; a request can name these and nothing else."""

    def __init__(self, models: Sequence[str], limits: Mapping[str, Any], **placed: Any) -> None:
        self.names, self.limits = list(models), Limits(**limits)
        dtype = getattr(torch, placed.get("dtype", "float32"))
        self._load = cache(partial(pretrained.load, device=placed.get("device", "cpu"), dtype=dtype))

    def warm(self) -> None:
        """Load everything now, so that the first keystroke finds it."""
        for name in self.names:
            self._load(name)
        for room in _ROOMS:
            importlib.import_module(f"clearhead.explore.{room}")

    def model(self, name: str) -> Any:
        if name not in self.names:
            raise ConfigError(f"there is no model {name!r} on this page; {did_you_mean(name, self.names)}")
        return self._load(name)

    def action(self, name: str) -> Callable[[dict[str, Any], Run], Any]:
        room = chosen(name, ACTIONS, "there is no action")
        act = getattr(importlib.import_module(f"clearhead.explore.{room}"), name)
        kind, *_ = get_type_hints(act).values()
        # A request is a frozen value: every field is known, has its type, and is inside its limits.
        return lambda ask, run: act(decode_choice({**ask, "type": kind.__name__}, (kind,), "this request"), run)


class Run:
    """One request at work."""

    def __init__(self, shelf: Shelf, send: Callable[[str, Any], None], stop: threading.Event) -> None:
        self.shelf, self._send, self._stop = shelf, send, stop

    def step(self, done: int = 0, of: int = 0, what: str = "") -> None:
        """Between two parts of the work: stop here if nobody waits, and say how far it is if that is given."""
        check(self._stop)
        if of:
            self._send("progress", {"done": done, "of": of, "what": what})

    def part(self, value: Any) -> None:
        """Something to be shown before all is done."""
        self.step()
        self._send("part", value)
