"""What a watch hears, filed into the tapes of a trace and changed by its edits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._numbers import has_numbers
from clearhead.attention.kernels.call import Call
from clearhead.errors import ConfigError
from clearhead.look.edit import Edit
from clearhead.look.foreign import OfTorchLayer, plain
from clearhead.look.patterns import Asked
from clearhead.look.recompute import Attended
from clearhead.look.record import Moment, Shelf


class Listener:
    """Keeps what was asked for, and nothing else; answers with what an edit makes of it, or None for no change."""

    def __init__(
        self, modules: Mapping[str, nn.Module], asked: Asked, edits: Mapping[str, list[Edit]], kept: Shelf
    ) -> None:
        self._modules, self._asked, self._edits, self.kept = modules, asked, edits, kept
        self.made: set[Edit] = set()

    def entering(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], moment: Moment) -> None:
        """A module is called."""
        self._keep("input", path, (*args, *kwargs.values()), moment)

    def leaving(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, moment: Moment) -> Any:
        """A module returns."""
        module, before = self._modules[path], output
        inner, outer = self._edits_of(path)
        if isinstance(module, nn.MultiheadAttention) and (inner or path in self._asked["weights"]):
            seen = OfTorchLayer(module, OfTorchLayer.arguments(module, args, kwargs), output[0])
            output = self._torch_layer(seen, inner, path, output, moment)
        if outer:
            output = with_first(output, lambda x: self._edited(x, outer, path, moment))
        self._keep("output", path, output, moment)
        return None if output is before else output

    def wants(self, path: str) -> bool:
        """Whether to be told when this module attends. torch's layer is heard as a whole, when it returns."""
        heard_whole = isinstance(self._modules[path], nn.MultiheadAttention)
        return not heard_whole and (path in self._asked["weights"] or path in self._edits)

    def attended(
        self, path: str, call: Callable[[], tuple[Call, str | None]], output: Tensor, moment: Moment
    ) -> Tensor | None:
        """`attend`, or torch's function, was called by this module itself; `call` reads its arguments."""
        inner, _ = self._edits_of(path)
        real = output if output.dim() > 3 else output.unsqueeze(-3)  # torch's function needs no heads
        edited = self._edited(real, inner, path, moment)
        if path in self._asked["weights"] and not _recomputing():
            seen = Attended(*call(), _lasting(real).detach(), _lasting(edited).detach())
            # Without a cache, calls belong together that one call of the module makes over the same keys.
            together = replace(moment, call=(moment.call, seen.call.k.data_ptr(), seen.call.k.shape))
            self.kept.add("weights", path, seen, together, rows=real.shape[-2], batch=real.shape[0])
        return edited.reshape(output.shape) if inner else None

    def _keep(self, kind: str, path: str, value: Any, moment: Moment) -> None:
        x = first_tensor(value) if path in self._asked[kind] and not _recomputing() else None
        if x is not None:
            self.kept.keep(kind, path, plain(_lasting(x).detach()), moment)

    def _edits_of(self, path: str) -> tuple[list[Edit], list[Edit]]:
        """The edits of a module's heads, and those of its output."""
        edits = self._edits.get(path, ())
        return [edit for edit in edits if edit.heads is not None], [edit for edit in edits if edit.heads is None]

    def _edited(self, x: Tensor, edits: list[Edit], path: str, moment: Moment) -> Tensor:
        self.made.update(edits)
        for edit in edits:
            x = edit.apply(x, path, moment)
        return x

    def _torch_layer(self, seen: OfTorchLayer, inner: list[Edit], path: str, output: Any, moment: Moment) -> Any:
        if inner and output[0].is_nested:
            raise ConfigError(
                f"{path} is given nested tensors, and heads are edited in plain ones; make the nn.TransformerEncoder "
                "with enable_nested_tensor=False"
            )
        edited = self._edited(seen.heads(), inner, path, moment) if inner else None
        if path in self._asked["weights"] and not _recomputing():
            _lasting(output[0])
            rows, batch = seen.out.shape[-2], seen.out.shape[0]
            self.kept.add("weights", path, seen.kept(edited), moment, rows=rows, batch=batch)
        return output if edited is None else (seen.given_back(edited), *output[1:])


def _lasting(x: Tensor) -> Tensor:
    """x, if it will still have its numbers when it is asked for them."""
    if not torch.compiler.is_compiling() and not has_numbers(x):
        raise ConfigError(
            "the model runs inside of torch.func or a FakeTensorMode, whose tensors are nothing outside of it, and a "
            "trace keeps tensors; call the model itself in the `with` block"
        )
    return x


def _recomputing() -> bool:
    """Whether this is a backward pass: checkpointing then runs the model again, which is no run of its own."""
    return torch._C._current_graph_task_id() != -1


def first_tensor(value: Any) -> Tensor | None:
    """The tensor that is meant where a module returns or is given several things: logits, or the first."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        value = (value["logits"],) if "logits" in value else tuple(value.values())
    if isinstance(value, (tuple, list)):
        return next((found for found in map(first_tensor, value) if found is not None), None)
    return None


def with_first(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same thing with its first tensor changed: the one that `first_tensor` finds."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        holding = (name for name, part in value.items() if first_tensor(part) is not None)
        name = "logits" if "logits" in value else next(holding, None)
        return value if name is None else type(value)(**{**value, name: with_first(value[name], change)})
    if isinstance(value, (tuple, list)):
        at = next((i for i, part in enumerate(value) if first_tensor(part) is not None), None)
        if at is None:
            return value
        parts = [with_first(part, change) if i == at else part for i, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
