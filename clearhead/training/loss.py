"""The loss of a batch: cross-entropy, in chunks of the vocabulary's product, so that the logits are never all there.

The logits of GPT-2 for 64 rows of 1,024 tokens are 13 GiB in float32, and autograd would keep them and more. A model
that offers `features` (what its logits are made of) and `vocabulary` (the matrix that makes them) is asked for those
instead. Then a few thousand rows at a time have their logits, their loss and, at once, its gradients: what is kept is
as large as features and matrix are. Every other model is asked for logits.

    N labels   M model width   V vocabulary"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._numbers import runs_triton
from clearhead._shapes import Float, Int
from clearhead.data.batch import Batch
from clearhead.data.ragged import round_up
from clearhead.errors import ConfigError

# Logits at once: compiled they are held twice in bfloat16, 1 GiB each; else several times in float32, 128 MiB each.
_AT_ONCE, _AT_ONCE_COMPILED = 1 << 25, 1 << 29


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is summed up over the labels, and how its chunks are computed.

    With `smoothing` ε the right label is wanted with probability 1 − ε + ε/V and each other with ε/V. With
    `r_drop_alpha` α the second half of the rows are the examples of the first half again, and the two answers are held
    together (R-Drop, Liang et al. 2021): ½ (CE₁ + CE₂) + α/2 · ½ (KL(p₁‖p₂) + KL(p₂‖p₁))."""

    smoothing: float = 0.0
    r_drop_alpha: float = 0.0
    at_once: int = _AT_ONCE
    multiple: int | None = None  # of the width of the product; None: 64 on a GPU, whose matrix units like it
    of_logits: Callable[..., Tensor] | None = None  # compiled twins of the functions below
    of_chunk: Callable[..., tuple[Tensor, Tensor]] | None = None

    def compiled(self, *, one_shape: bool) -> Objective:
        """The same, with its functions compiled: for batches of one shape, or once for all shapes."""
        return replace(
            self,
            at_once=_AT_ONCE_COMPILED if self.at_once == _AT_ONCE else self.at_once,
            of_logits=torch.compile(loss_of_logits, dynamic=not one_shape),
            of_chunk=torch.compile(_loss_and_gradient, dynamic=not one_shape),
        )


PLAIN = Objective()


def loss_sum(model: nn.Module, batch: Batch, objective: Objective = PLAIN) -> Float[Tensor, ""]:
    """The loss of a batch as a sum over its labels, in nats: sums add up over batches and processes, means would not.

    With `r_drop_alpha` every example goes through the model twice, under two draws of dropout."""
    if objective.r_drop_alpha:
        batch = batch.map(lambda tensor: torch.cat((tensor, tensor)))
    parts: Any = parts_of(model)
    if parts is not None:
        x, bias = batch.logits(parts.hidden_states), getattr(parts, "logit_bias", None)
        return chunked_loss(x, parts.lm_head_weight(), batch.labels, batch.weights, objective, bias)
    logits = batch.logits(model)
    if (own := batch.custom_loss(logits)) is not None:
        if objective.smoothing or objective.r_drop_alpha:
            raise ConfigError(
                f"label_smoothing and r_drop_alpha are for labels one by one, and a {type(batch).__name__} has a loss "
                "of its own; leave them at 0"
            )
        return own
    of_logits = objective.of_logits or loss_of_logits
    return of_logits(logits, batch.labels, batch.weights, objective.smoothing, objective.r_drop_alpha)


def parts_of(model: nn.Module) -> nn.Module | None:
    """The model, if it can be asked for features and vocabulary instead of logits.

    Not where a subclass has a `forward` of its own beside inherited `features`, nor where somebody listens at the
    model: what they do would be passed over. Nor where logits are capped, which is no product."""
    if getattr(getattr(model, "config", None), "logit_softcap", None) is not None:
        return None
    owner = {
        name: next((c for c in type(model).__mro__ if name in vars(c)), None) for name in ("forward", "hidden_states")
    }
    is_heard = model._forward_hooks or model._forward_pre_hooks
    return (
        model
        if owner["hidden_states"] is not None and owner["hidden_states"] is owner["forward"] and not is_heard
        else None
    )


def loss_of_logits(
    logits: Float[Tensor, "*N V"],
    labels: Int[Tensor, "*N"],
    weights: Float[Tensor, "*N"],
    label_smoothing: float = 0.0,
    r_drop_alpha: float = 0.0,
) -> Float[Tensor, ""]:
    """The weighted sum of cross-entropies, as `Objective` says: the plain way, and the definition of the other."""
    log_probs = _wide(logits).log_softmax(-1)
    losses = -log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * log_probs.mean(-1)
    total = (losses * weights).sum()
    if not r_drop_alpha:
        return total
    first, second = log_probs.unflatten(0, (2, -1))
    apart = ((first.exp() - second.exp()) * (first - second)).sum(-1)  # KL(p₁‖p₂) + KL(p₂‖p₁)
    return total / 2 + r_drop_alpha / 4 * (apart * weights.unflatten(0, (2, -1))[0]).sum()


@torch.no_grad()
def scores(model: nn.Module, batch: Batch) -> Float[Tensor, "2"]:
    """The sum of losses without smoothing, and the number of labels that got the highest score."""
    parts: Any = parts_of(model)
    if parts is None:
        logits = batch.logits(model)
        if (own := batch.custom_loss(logits)) is not None:
            return torch.stack((own.double(), own.new_tensor(batch.right(logits), dtype=torch.float64)))
        return _scores_of_logits(logits, batch.labels, batch.weights)
    x, matrix = batch.logits(parts.hidden_states).flatten(0, -2), parts.lm_head_weight()
    bias = getattr(parts, "logit_bias", None)
    rows = _rows(len(matrix), _AT_ONCE)
    chunks = zip(x.split(rows), batch.labels.flatten().split(rows), batch.weights.flatten().split(rows), strict=True)
    found = [_scores_of_logits(F.linear(some, matrix, bias), labels, weights) for some, labels, weights in chunks]
    return torch.stack(found).sum(0)


def _scores_of_logits(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    right = (logits.argmax(-1) == labels).to(weights.dtype) * (weights > 0)
    return torch.stack((loss_of_logits(logits, labels, weights), right.sum())).double()


# ---------------------------------------------------------------------- in chunks


def chunked_loss(
    x: Float[Tensor, "*N M"],
    matrix: Float[Tensor, "V M"],
    labels: Int[Tensor, "*N"],
    weights: Float[Tensor, "*N"],
    objective: Objective = PLAIN,
    bias: Float[Tensor, " V"] | None = None,
) -> Float[Tensor, ""]:
    """`loss_of_logits(x matrixᵀ + bias, …)`, without ever having all the logits."""
    learns = torch.is_grad_enabled()
    return _ChunkedLoss.apply(x.flatten(0, -2), matrix, bias, labels.flatten(), weights.flatten(), objective, learns)


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are made on the way forward, while a chunk's logits are at hand; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor,
        objective: Objective,
        learns: bool,
    ) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        with torch.autocast(kind, enabled=False):
            total, gradients = _walk(x, matrix.to(dtype), bias, labels, weights, objective, learns)
        if learns:
            ctx.save_for_backward(*gradients)
            ctx.like = [(given.dtype, len(given)) for given in (x, matrix) + (() if bias is None else (bias,))]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [
            (saved[:n] * gradient).to(dtype) for saved, (dtype, n) in zip(ctx.saved_tensors, ctx.like, strict=True)
        ]
        return (*found, *[None] * (7 - len(found)))


def _walk(
    x: Tensor, matrix: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor, objective: Objective, learns: bool
) -> tuple[Tensor, list[Tensor]]:
    """The loss, and its gradients by x, matrix and bias (these two longer by the padding), chunk by chunk."""
    V = len(matrix)
    width = round_up(V, objective.multiple or (64 if x.is_cuda else 1))
    matrix = F.pad(matrix, (0, 0, 0, width - V))
    of_chunk = objective.of_chunk or _loss_and_gradient
    halves = 2 if objective.r_drop_alpha else 1  # both answers to an example have to be in one chunk
    rows = max(1, _rows(width, objective.at_once) // halves)
    wide = torch.promote_types(matrix.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=x.device)
    by_x = torch.empty_like(x, dtype=matrix.dtype) if learns else x
    by_matrix = torch.zeros_like(matrix, dtype=wide)
    by_bias = torch.zeros(width, dtype=wide, device=x.device)
    parts = [given.unflatten(0, (halves, -1)) for given in (x, labels, weights, by_x)]
    for xs, ys, ws, into in zip(*(part.split(rows, dim=1) for part in parts), strict=True):
        some = xs.flatten(0, 1).to(matrix.dtype)
        logits = some @ matrix.T
        if bias is not None:
            logits = logits + F.pad(bias, (0, width - V)).to(logits.dtype)
        ys, ws = ys.flatten(), ws.flatten()
        if runs_triton(logits) and not objective.r_drop_alpha and logits.dtype != torch.float64:
            from clearhead.training.loss_triton import loss_and_gradient

            found, by_logits = loss_and_gradient(logits, ys, ws, V, objective.smoothing)
        else:
            found, by_logits = of_chunk(logits, ys, ws, V, objective.smoothing, objective.r_drop_alpha)
        del logits
        total += found
        if learns:
            into.copy_((by_logits @ matrix).unflatten(0, (halves, -1)))
            if x.is_cuda and by_logits.dtype != wide:  # added up in float32 by the product itself
                torch.addmm(by_matrix, by_logits.T, some, out_dtype=wide, out=by_matrix)
            else:
                by_matrix += by_logits.T @ some
            by_bias += by_logits.sum(0, dtype=wide) if bias is not None else 0
    return total, [by_x, by_matrix, *([] if bias is None else [by_bias])]


def _loss_and_gradient(
    logits: Tensor, labels: Tensor, weights: Tensor, V: int, smoothing: float, r_drop_alpha: float
) -> tuple[Tensor, Tensor]:
    """The summed loss of a chunk, and its derivative by the logits, in their dtype; columns from V on are padding."""
    z = _wide(logits)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    real = columns < V
    z = z.masked_fill(~real, -torch.inf)
    # Written out, because a compiler makes one pass over the logits of largest and sum in this form, and no other.
    largest = z.amax(-1, keepdim=True)
    log_z = largest + (z - largest).exp().sum(-1, keepdim=True).log()
    log_p = z - log_z
    p = log_p.exp()
    is_label = columns == labels[:, None]
    losses = log_z.squeeze(-1) - (1 - smoothing) * z.gather(-1, labels[:, None]).squeeze(-1)
    by_z = p - (1 - smoothing) * is_label.to(p.dtype)
    if smoothing:
        losses = losses - smoothing * z.masked_fill(~real, 0.0).sum(-1) / V
        by_z = by_z - (smoothing / V) * real.to(p.dtype)
    total = (losses * weights).sum()
    if r_drop_alpha:
        (log_p1, log_p2), (p1, p2) = log_p.unflatten(0, (2, -1)), p.unflatten(0, (2, -1))
        far = (log_p1 - log_p2).masked_fill(~real, 0.0)
        apart = ((p1 - p2) * far).sum(-1)
        total = total / 2 + r_drop_alpha / 4 * (apart * weights[: len(apart)]).sum()
        # Of Σ (p₁ − p₂) (log p₁ − log p₂), through the softmax.
        by_first = p1 * (far - (p1 * far).sum(-1, keepdim=True)) + p1 - p2
        by_second = -p2 * (far - (p2 * far).sum(-1, keepdim=True)) + p2 - p1
        by_z = by_z / 2 + r_drop_alpha / 4 * torch.cat((by_first, by_second))
    return total, (by_z * weights[:, None]).to(logits.dtype)


def _rows(V: int, at_once: int) -> int:
    """How many rows of logits are made at once: a power of two, so that chunks of usual batches are equal."""
    return 1 << (max(1, at_once // V).bit_length() - 1)


def _wide(x: Tensor) -> Tensor:
    """Statistics are made in float32, or wider where the numbers are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ModelWithLoss(nn.Module):
    """A model and its loss in one module: what processes share has to hold the vocabulary's product too."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Batch, *, score: bool = False) -> Tensor:
        """The sum of losses; with `score` what `scores` gives, for validation."""
        return scores(self.model, batch) if score else loss_sum(self.model, batch, self.objective)
