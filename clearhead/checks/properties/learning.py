"""What training relies on: every parameter gets a gradient, and training mode without dropout computes the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from clearhead.checks.lab import Case, Lab
from clearhead.checks.properties.base import Property, Seen, compared
from clearhead.checks.subject import all_tensors


class GradientsReach(Property):
    """Every parameter that wants a gradient gets one from the outputs."""

    name = "gradients reach every parameter"
    done = "took the gradient of a random sum of all outputs with respect to every parameter"
    shrinks = False

    def why_not(self, lab: Lab) -> str | None:
        if not isinstance(lab.module, nn.Module) or not any(p.requires_grad for p in lab.module.parameters()):
            return "the module has no parameters to train"
        return None

    def look(self, lab: Lab, case: Case) -> Iterator[Seen]:
        if case.length == 1 and lab.subject.is_sequence and lab.subject.max_len != 1:
            # A single key has weight 1, whatever its score: there would be nothing to learn.
            case = lab.draw(case.x.shape[0], 2)
        module = lab.copy()
        generator = torch.Generator().manual_seed(lab.seed)
        # Weights that start at exactly 0 block the gradient of what stands before them, rightly: move off that point.
        with torch.no_grad():
            for p in module.parameters():
                if p.is_floating_point():
                    p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.01)
        idle: set[nn.Parameter] = set()  # of parts that got no token at all, as an expert that none of them picks

        def note(part: nn.Module, given: tuple[Any, ...]) -> None:
            if given and isinstance(given[0], torch.Tensor) and not given[0].numel():
                idle.update(part.parameters())

        for part in module.modules():
            part.register_forward_pre_hook(note)
        outs = [t for t in all_tensors(lab.raw(case.batch(), module)) if t.requires_grad]
        if outs:
            torch.autograd.backward(outs, [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in outs])
        wanted = [(n, p) for n, p in module.named_parameters() if p.requires_grad and p not in idle]
        without = [n for n, p in wanted if p.grad is None or not bool(p.grad.any())]
        names = ", ".join(without[:4]) + (f" and {len(without) - 4} more" if len(without) > 4 else "")
        yield Seen(difference=float(len(without)), tolerance=0.0, where=f"no gradient at {names}" if without else "")

    def cause(self, lab: Lab, case: Case, failed: Sequence[Seen]) -> str:
        return (
            "these parameters do not take part, or a detach(), argmax, .data or no_grad() cuts them off from the "
            "output; a part that is made and never called also shows here"
        )


class TrainIsEval(Property):
    """With dropout at 0, training mode computes what evaluation mode does."""

    name = "train = eval without dropout"
    done = "set every dropout to 0 and compared training mode with evaluation mode"

    def why_not(self, lab: Lab) -> str | None:
        if not isinstance(lab.module, nn.Module):
            return "a function has no training mode"
        if not lab.subject.is_sequence and _batch_norms(lab):
            return "batch-norm over blocks of numbers takes other statistics in training, by design"
        return None

    def look(self, lab: Lab, case: Case) -> Iterator[Seen]:
        module = lab.copy()
        without_dropout(module)
        wanted = lab.out(case.batch(), module)
        module.train()
        with NoDropout():
            first = lab.out(case.batch(), module)
        yield compared(lab, first, wanted, "training mode")

    def cause(self, lab: Lab, case: Case, failed: Sequence[Seen]) -> str:
        for name in _batch_norms(lab):
            return (
                f"batch-norm ({name}) takes its statistics from the batch in training: over other sequences and, "
                "in a decoder, over later positions; use layer-norm"
            )
        return (
            "something acts in training that is not dropout with a rate that can be set to 0 (noise, a drop of layers)"
        )


def _batch_norms(lab: Lab) -> list[str]:
    return [name for name, part in lab.parts.items() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


class NoDropout(TorchFunctionMode):
    """Inside of it, dropout that is called as a function drops nothing, wherever its rate comes from."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            x = args[0] if args else kwargs["input"]
            return x if kwargs.get("inplace") or func is torch.dropout_ else x.clone()
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], *[0.0 for _ in args[4:5]], *args[5:])
            kwargs = {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


_DROPOUTS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.dropout_,
)  # fmt: skip


def without_dropout(module: nn.Module) -> None:
    """Sets every dropout rate below `module` to 0: of dropout modules, and numbers under a name with "drop" in it."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        for name, value in list(vars(part).items()):
            if "drop" in name.lower() and isinstance(value, float):
                setattr(part, name, 0.0)
