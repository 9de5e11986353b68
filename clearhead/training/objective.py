"""Cross-entropy of a batch, with the logits computed in chunks.

The logits of GPT-2 for 64 rows of 1,024 tokens take 13 GiB in float32, and autograd would store them and more. If a
model has `hidden_states` and `lm_head_weight`, a few thousand rows at a time are multiplied with the weight, and their
loss and gradients are computed at once, so memory is proportional to hidden states and weight. Other models return
their logits.

    N labels   M model width   V vocabulary"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.shapes import Float, Int
from clearhead._core.tensor_state import runs_triton
from clearhead._core.typed_module import Module
from clearhead.data.batch import Batch
from clearhead.data.packing import round_up
from clearhead.errors import ConfigError

# Logits per chunk. Compiled code stores them twice in bfloat16 (1 GiB each), eager code several times in float32
# (128 MiB each).
_CHUNK_LOGITS = 1 << 25
_CHUNK_LOGITS_COMPILED = 1 << 29


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss per label, and how its chunks are computed.

    With `smoothing` ε the target probability is 1 − ε + ε/V for the label and ε/V for each other class. With
    `r_drop_alpha` α the second half of the rows repeats the examples of the first half, and the two predictions are
    pulled together (R-Drop, Liang et al. 2021): ½ (CE₁ + CE₂) + α/2 · ½ (KL(p₁‖p₂) + KL(p₂‖p₁))."""

    smoothing: float = 0.0
    r_drop_alpha: float = 0.0
    at_once: int = _CHUNK_LOGITS
    multiple: int | None = None  # of the vocabulary dimension; None: 64 on a GPU, for its matrix units
    of_logits: Callable[..., Tensor] | None = None  # compiled versions of the functions below
    of_chunk: Callable[..., tuple[Tensor, Tensor]] | None = None

    def compiled(self, *, one_shape: bool) -> Objective:
        """Return the objective with compiled functions: for batches of one shape, or once for all shapes."""
        return replace(
            self,
            at_once=_CHUNK_LOGITS_COMPILED if self.at_once == _CHUNK_LOGITS else self.at_once,
            of_logits=torch.compile(loss_of_logits, dynamic=not one_shape),
            of_chunk=torch.compile(_loss_and_gradient, dynamic=not one_shape),
        )


PLAIN = Objective()


@runtime_checkable
class ChunkableModel(Protocol):
    """A model whose logits are the product of its hidden states and a weight, plus `logit_bias` if it has one."""

    def hidden_states(self, *args: object, **kwargs: object) -> Tensor:
        """Return the hidden states of a batch, (..., M)."""

    def lm_head_weight(self) -> Tensor:
        """Return the weight, (V, M)."""


def chunkable_model(model: nn.Module) -> ChunkableModel | None:
    """Return the model if its logits are the product of `hidden_states` and `lm_head_weight`, else None.

    A subclass that overrides `forward` but not `hidden_states` would be skipped, and soft-capped logits are not a
    product of the two."""
    has_softcap = getattr(getattr(model, "config", None), "logit_softcap", None) is not None
    if not isinstance(model, ChunkableModel) or has_softcap:
        return None
    return model if _defining_class(model, "forward") is _defining_class(model, "hidden_states") else None


def _defining_class(model: object, method: str) -> type | None:
    """Return the class whose method of this name the model inherits."""
    return next((c for c in type(model).__mro__ if method in vars(c)), None)


def loss_sum(model: nn.Module, batch: Batch, objective: Objective = PLAIN) -> Float[Tensor, ""]:
    """Return the loss of a batch as a sum over its labels, in nats; sums can be added over batches and processes.

    With `r_drop_alpha` every example passes through the model twice, with different dropout masks."""
    return ModelWithLoss(model, objective)(batch)


def loss_of_logits(
    logits: Float[Tensor, "*N V"],
    labels: Int[Tensor, "*N"],
    weights: Float[Tensor, "*N"],
    label_smoothing: float = 0.0,
    r_drop_alpha: float = 0.0,
) -> Float[Tensor, ""]:
    """Return the weighted sum of cross-entropies (see `Objective`): the reference for `chunked_loss`."""
    log_probs = _wide(logits).log_softmax(-1)
    losses = -log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * log_probs.mean(-1)
    total = (losses * weights).sum()
    if not r_drop_alpha:
        return total
    first, second = log_probs.unflatten(0, (2, -1))
    divergence: Tensor = ((first.exp() - second.exp()) * (first - second)).sum(-1)  # KL(p₁‖p₂) + KL(p₂‖p₁)
    weighted: Tensor = (divergence * weights.unflatten(0, (2, -1))[0]).sum()
    return total / 2 + r_drop_alpha / 4 * weighted


def scores(model: nn.Module, batch: Batch) -> Float[Tensor, "2"]:
    """Return the sum of unsmoothed losses and the number of correct labels."""
    return ModelWithLoss(model, PLAIN)(batch, score=True)


def _scores_in_chunks(x: Tensor, matrix: Tensor, bias: Tensor | None, batch: Batch) -> Float[Tensor, "2"]:
    """Return the sums of `scores` from hidden states, without storing all logits."""
    x = x.flatten(0, -2)
    rows = _rows(len(matrix), _CHUNK_LOGITS)
    chunks = zip(x.split(rows), batch.labels.flatten().split(rows), batch.weights.flatten().split(rows), strict=True)
    sums = [_scores_of_logits(F.linear(part, matrix, bias), labels, weights) for part, labels, weights in chunks]
    return torch.stack(sums).sum(0)


def _scores_of_logits(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    is_correct = (logits.argmax(-1) == labels).to(weights.dtype) * (weights > 0)
    return torch.stack((loss_of_logits(logits, labels, weights), is_correct.sum())).double()


# ---------------------------------------------------------------------- chunked computation


def chunked_loss(
    x: Float[Tensor, "*N M"],
    matrix: Float[Tensor, "V M"],
    labels: Int[Tensor, "*N"],
    weights: Float[Tensor, "*N"],
    objective: Objective = PLAIN,
    bias: Float[Tensor, " V"] | None = None,
) -> Float[Tensor, ""]:
    """Return `loss_of_logits(x matrixᵀ + bias, …)` without storing all logits."""
    needs_grad = torch.is_grad_enabled()
    loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, -2), matrix, bias, labels.flatten(), weights.flatten(), objective, needs_grad
    )
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients in forward, chunk by chunk; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor,
        objective: Objective,
        needs_grad: bool,
    ) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        with torch.autocast(kind, enabled=False):
            total, gradients = _chunked_forward_backward(
                x, matrix.to(dtype), bias, labels, weights, objective, needs_grad
            )
        if needs_grad:
            ctx.save_for_backward(*gradients)
            ctx.like = [(tensor.dtype, len(tensor)) for tensor in (x, matrix) + (() if bias is None else (bias,))]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [
            (saved[:n] * gradient).to(dtype) for saved, (dtype, n) in zip(ctx.saved_tensors, ctx.like, strict=True)
        ]
        return (*gradients, *[None] * (7 - len(gradients)))


def _chunked_forward_backward(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    objective: Objective,
    needs_grad: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and its gradients by x, matrix and bias; the latter two include the padding."""
    V = len(matrix)
    width = round_up(V, objective.multiple or (64 if x.is_cuda else 1))
    matrix = F.pad(matrix, (0, 0, 0, width - V))
    of_chunk = objective.of_chunk or _loss_and_gradient
    n_copies = 2 if objective.r_drop_alpha else 1  # both predictions of an example must be in one chunk
    rows = max(1, _rows(width, objective.at_once) // n_copies)
    wide = torch.promote_types(matrix.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=x.device)
    by_x = torch.empty_like(x, dtype=matrix.dtype) if needs_grad else x
    by_matrix = torch.zeros_like(matrix, dtype=wide)
    by_bias = torch.zeros(width, dtype=wide, device=x.device)
    parts = [tensor.unflatten(0, (n_copies, -1)) for tensor in (x, labels, weights, by_x)]
    for xs, ys, ws, into in zip(*(part.split(rows, dim=1) for part in parts), strict=True):
        x_chunk = xs.flatten(0, 1).to(matrix.dtype)
        logits = x_chunk @ matrix.T
        if bias is not None:
            logits = logits + F.pad(bias, (0, width - V)).to(logits.dtype)
        ys, ws = ys.flatten(), ws.flatten()
        if runs_triton(logits) and not objective.r_drop_alpha and logits.dtype != torch.float64:
            from clearhead.ops.cross_entropy_triton import loss_and_gradient

            loss, by_logits = loss_and_gradient(logits, ys, ws, V, objective.smoothing)
        else:
            loss, by_logits = of_chunk(logits, ys, ws, V, objective.smoothing, objective.r_drop_alpha)
        del logits
        total += loss
        if needs_grad:
            into.copy_((by_logits @ matrix).unflatten(0, (n_copies, -1)))
            if x.is_cuda and by_logits.dtype != wide:  # accumulated in float32 by the GEMM
                torch.addmm(by_matrix, by_logits.T, x_chunk, out_dtype=wide, out=by_matrix)
            else:
                by_matrix += by_logits.T @ x_chunk
            by_bias += by_logits.sum(0, dtype=wide) if bias is not None else 0
    return total, [by_x, by_matrix, *([] if bias is None else [by_bias])]


def _loss_and_gradient(
    logits: Tensor, labels: Tensor, weights: Tensor, V: int, smoothing: float, r_drop_alpha: float
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a chunk and its gradient by the logits; columns from V on are padding."""
    z = _wide(logits)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    real = columns < V
    z = z.masked_fill(~real, -torch.inf)
    # In this form the compiler computes maximum and sum in one pass over the logits.
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
        log_ratio = (log_p1 - log_p2).masked_fill(~real, 0.0)
        divergence = ((p1 - p2) * log_ratio).sum(-1)
        total = total / 2 + r_drop_alpha / 4 * (divergence * weights[: len(divergence)]).sum()
        # Gradient of Σ (p₁ − p₂) (log p₁ − log p₂) through the softmax.
        by_first = p1 * (log_ratio - (p1 * log_ratio).sum(-1, keepdim=True)) + p1 - p2
        by_second = -p2 * (log_ratio - (p2 * log_ratio).sum(-1, keepdim=True)) + p2 - p1
        by_z = by_z / 2 + r_drop_alpha / 4 * torch.cat((by_first, by_second))
    return total, (by_z * weights[:, None]).to(logits.dtype)


def _rows(V: int, at_once: int) -> int:
    """Return the number of rows per chunk: a power of two, so that chunks of usual batches are equal."""
    return 1 << (max(1, at_once // V).bit_length() - 1)


def _wide(x: Tensor) -> Tensor:
    """Return x in float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ModelWithLoss(Module):
    """A model and its loss in one module, so that DDP and FSDP include the product with the vocabulary."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self._is_chunkable = chunkable_model(model) is not None

    def forward(self, batch: Batch, *, score: bool = False) -> Tensor:
        """Return the sum of losses, or with `score` the result of `scores`, for validation."""
        return self._scores(batch) if score else self._loss(batch)

    def _chunkable(self) -> ChunkableModel | None:
        """Return the model if its loss can be computed in chunks, which would skip the hooks on its forward."""
        model: Any = self.model
        has_hooks = model._forward_hooks or model._forward_pre_hooks
        return model if self._is_chunkable and not has_hooks else None

    def _loss(self, batch: Batch) -> Tensor:
        objective = self.objective
        if objective.r_drop_alpha:
            batch = batch.map(lambda tensor: torch.cat((tensor, tensor)))
        if (lm := self._chunkable()) is not None:
            x = batch.logits(lm.hidden_states)
            bias = getattr(lm, "logit_bias", None)
            return chunked_loss(x, lm.lm_head_weight(), batch.labels, batch.weights, objective, bias)
        logits = batch.logits(self.model)
        if (loss := batch.custom_loss(logits)) is not None:
            if objective.smoothing or objective.r_drop_alpha:
                raise ConfigError(
                    f"label_smoothing and r_drop_alpha need one loss per label, and {type(batch).__name__} has a "
                    "custom loss; leave them at 0"
                )
            return loss
        of_logits = objective.of_logits or loss_of_logits
        return of_logits(logits, batch.labels, batch.weights, objective.smoothing, objective.r_drop_alpha)

    @torch.no_grad()
    def _scores(self, batch: Batch) -> Tensor:
        if (lm := self._chunkable()) is not None:
            x = batch.logits(lm.hidden_states)
            bias = getattr(lm, "logit_bias", None)
            return _scores_in_chunks(x, lm.lm_head_weight(), bias, batch)
        logits = batch.logits(self.model)
        if (loss := batch.custom_loss(logits)) is not None:
            return torch.stack((loss.double(), loss.new_tensor(batch.n_correct(logits), dtype=torch.float64)))
        return _scores_of_logits(logits, batch.labels, batch.weights)
