"""Every call of every module in one run, in order and nested as it happened: what a walk is made from.
`visits[0].parts` are the calls that the model's forward made, each with what it was given and what it gave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from clearhead.look.watch import first_tensor


@dataclass
class Visit:
    """One call of a module: the tensors it was given, the tensor it gave, and the calls that it made inside."""

    path: str
    module: nn.Module
    given: list[Tensor]
    gave: Tensor | None = None
    parts: list[Visit] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def all(self) -> Iterator[Visit]:
        """Itself and all that ran inside of it."""
        yield self
        for part in self.parts:
            yield from part.all

    @property
    def quiet(self) -> bool:
        """Whether it did nothing but hand on what it got: dropout in evaluation, `nn.Identity`."""
        handed_on = self.gave is not None and bool(self.given) and same(self.given[0], self.gave)
        return self.gave is None or (handed_on and not self.parts)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers."""
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())


@contextmanager
def visiting(model: nn.Module) -> Iterator[list[Visit]]:
    """The calls of the model itself while this is on. Tensors are copied: what is written over later stays as it was.

    A module that stands in two places (shared embeddings) is called by the name that it has where it is called."""
    found: list[Visit] = []
    running: list[Visit] = []
    names: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(path)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inside = f"{running[-1].path}." if running and running[-1].path else ""
        path = next((path for path in names[module] if path.startswith(inside)), names[module][0])
        tensors = [x for x in args if isinstance(x, Tensor)]
        tensors = tensors or [x for x in kwargs.values() if isinstance(x, Tensor)][:1]  # masks and the like come later
        visit = Visit(path, module, [x.detach().clone() for x in tensors])
        (running[-1].parts if running else found).append(visit)
        running.append(visit)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        first = first_tensor(output)
        running.pop().gave = None if first is None else first.detach().clone()

    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield found
