"""Record the module calls of a run, nested as the modules are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from clearhead._core.call_types import Args, Kwargs
from clearhead.analysis.inputs.module_calls import observing_modules
from clearhead.analysis.inputs.outputs import first_tensor
from clearhead.attention.biases import Tabulated


@dataclass
class ModuleCall:
    """One call of a module: input tensors, output tensor, and the calls of its submodules (`children`)."""

    path: str
    module: nn.Module
    inputs: list[Tensor]
    output: Tensor | None = None
    children: list[ModuleCall] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def all(self) -> Iterator[ModuleCall]:
        """The call and all calls inside it."""
        yield self
        for part in self.children:
            yield from part.all


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal."""
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())


@contextmanager
def record_calls(model: nn.Module) -> Iterator[list[ModuleCall]]:
    """Record the calls of the model. Tensors are copied, because later operations may overwrite them.

    A module with two paths (shared embeddings) gets the path at which it is called.
    """
    calls: list[ModuleCall] = []
    running: list[ModuleCall] = []
    names: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(path)

    def enter(_: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        prefix = f"{running[-1].path}." if running and running[-1].path else ""
        path = next((path for path in names[module] if path.startswith(prefix)), names[module][0])
        tensors = [x for x in args if isinstance(x, Tensor)]
        tensors = tensors or [x for x in kwargs.values() if isinstance(x, Tensor)][:1]  # masks come later
        visit = ModuleCall(path, module, [x.detach().clone() for x in tensors])
        (running[-1].children if running else calls).append(visit)
        running.append(visit)

    def leave(_: str, module: nn.Module, output: object) -> None:
        first = output.dense() if isinstance(output, Tabulated) else first_tensor(output)
        running.pop().output = None if first is None else first.detach().clone()

    with observing_modules(model, enter, leave):
        yield calls
