"""Attention that is not ours, in our words: torch's function and torch's layer as a `Call` of attention.

`F.scaled_dot_product_attention` takes a bool mask whose True may attend, or a float mask that is added; its causal flag
counts from the first key. `nn.MultiheadAttention` takes bool masks whose True is hidden. Both become the mask and bias
of a `Call`, from which weights follow as they do for our own layers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.attention import ScaledDot, Softmax
from clearhead.attention.kernels.call import Call
from clearhead.attention.under import from_sdpa
from clearhead.look.recompute import AttentionCall, VersionedRef, dropout_of
from clearhead.masks import Mask, forbid


def to_padded(x: Tensor) -> Tensor:
    """A nested tensor as a padded one; any other as it is."""
    return torch.nested.to_padded_tensor(x, 0.0) if x.is_nested else x


def nested_padding(x: Tensor) -> Tensor:
    """(B, T) of a nested tensor of B sequences: True where there is nothing."""
    lengths = torch.tensor([len(row) for row in x.unbind()], device=x.device)
    return torch.arange(int(lengths.max()), device=x.device) >= lengths[:, None]


def sdpa_inputs(*args: Any, **kwargs: Any) -> tuple[Call, None]:
    """The arguments of `F.scaled_dot_product_attention` as ours; tensors without heads get one."""
    given: dict[str, Any] = from_sdpa(*args, **kwargs)
    given |= {name: x.detach() for name, x in given.items() if isinstance(x, Tensor)}
    return Call(**given | {"query_offset": 0}), None


class TorchLayerCall(AttentionCall):
    """One call of `nn.MultiheadAttention`, seen from outside: its inputs, and its output (B, T, M).

    Queries, keys and values are projected again when they are asked for, with the weights that the layer has then;
    weights that were changed in between (by an optimiser, say) are refused."""

    whole: ClassVar[bool] = True

    def __init__(self, layer: nn.MultiheadAttention, given: Mapping[str, Any], output: Tensor) -> None:
        self._layer = layer
        self._inputs: list[Tensor] = [to_padded(given[name]) for name in ("query", "key", "value")]
        self._padding: Tensor | None = given.get("key_padding_mask")
        self._mask: Tensor | None = given.get("attn_mask")
        if output.is_nested:  # rows of padding: what heads that give zeros would make
            hidden, bias = nested_padding(output), layer.out_proj.bias
            output = torch.where(hidden[..., None], 0.0 if bias is None else bias.detach(), to_padded(output))
            self._mask = hidden[:, None, :, None].expand(-1, layer.num_heads, -1, output.shape[1]).flatten(0, 1)
        self._out = output
        self._changed: Tensor | None = None
        self._differentiable = True
        self._given = VersionedRef("the input of this nn.MultiheadAttention has", *self._inputs)
        self._learned = VersionedRef("the parameters of this nn.MultiheadAttention have", *layer.parameters())
        self._gave = VersionedRef("what this nn.MultiheadAttention gave has", output)

    @staticmethod
    def bind_arguments(layer: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The layer's arguments by name."""
        given = dict(inspect.signature(layer.forward).bind(*args, **kwargs).arguments)
        if given["key"].is_nested:  # as nn.TransformerEncoder makes of padded batches
            given["key_padding_mask"] = nested_padding(given["key"])
        return given

    @property
    def how(self) -> str:
        return "nn.MultiheadAttention"

    def kept(self, edited: Tensor | None) -> TorchLayerCall:
        """The same for keeping, without a graph; `edited` is what edits made of its heads."""
        query, key, value = (x.detach() for x in self._inputs)
        given = {"query": query, "key": key, "value": value, "key_padding_mask": self._padding, "attn_mask": self._mask}
        kept = TorchLayerCall(self._layer, given, self._out.detach())
        kept._changed = None if edited is None else edited.detach()
        kept._differentiable = False
        return kept

    def given_back(self, heads: Tensor) -> Tensor:
        """What the layer would have returned, had its heads given this: its output in its own layout."""
        out = self.joined(heads)
        return out[0] if self._out.dim() == 2 else out if self._layer.batch_first else out.transpose(0, 1)

    @cached_property
    def out(self) -> Tensor:
        self._gave.check()
        return self._batch_first(self._out)

    @cached_property
    def call(self) -> Call:
        layer = self._layer
        self._learned.check()
        self._given.check()
        with torch.set_grad_enabled(self._differentiable and torch.is_grad_enabled()):
            q, k, v, added = self._projected()  # (B, H, T, D)
        mask, bias = self._masks(added)
        return Call(q, k, v, mask, ScaledDot(), Softmax(dropout=layer.dropout if layer.training else 0.0), bias, 0)

    def heads(self) -> Tensor:
        """(B, H, T, D), attended anew by torch's function: the layer itself shows only their sum."""
        if self._changed is not None:
            return self._changed
        call = self.call
        allowed = call.allowed()
        if call.bias is not None:
            bias = call.bias.to(call.q.dtype)
            allowed = bias if allowed is None else bias.masked_fill(~allowed, -math.inf)
        return F.scaled_dot_product_attention(call.q, call.k, call.v, attn_mask=allowed, dropout_p=dropout_of(call))

    def joined(self, heads: Tensor) -> Tensor:
        """(B, H, r, D) → (B, r, M), through the layer's output projection."""
        projection = self._layer.out_proj
        bias = None if projection.bias is None else projection.bias.to(heads.dtype)
        return F.linear(heads.transpose(-2, -3).flatten(-2), projection.weight.to(heads.dtype), bias)

    def _projected(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Queries, keys and values, with those that the layer itself adds at the end, and how many these are."""
        layer = self._layer
        apart = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        matrices = apart if layer.in_proj_weight is None else layer.in_proj_weight.chunk(3)
        biases = (None, None, None) if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
        products = map(F.linear, map(self._batch_first, self._inputs), matrices, biases)
        q, k, v = (x.unflatten(-1, (layer.num_heads, -1)).transpose(-2, -3) for x in products)
        before = k.shape[-2]
        if layer.bias_k is not None and layer.bias_v is not None:
            own = [x.reshape(1, layer.num_heads, 1, -1) for x in (layer.bias_k, layer.bias_v)]
            k, v = (torch.cat((x, one.expand(len(x), -1, -1, -1)), -2) for x, one in zip((k, v), own, strict=True))
        if layer.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return q, k, v, k.shape[-2] - before

    def _masks(self, added: int) -> tuple[Mask | None, Tensor | None]:
        """Both masks of torch's layer, each a bool whose True is hidden or a float that is added."""
        T, S = self.out.shape[-2], self._batch_first(self._inputs[1]).shape[-2] + added
        mask: Mask | None = None
        bias: Tensor | None = None
        for given, is_padding in ((self._mask, False), (self._padding, True)):
            if given is None:
                continue
            x = F.pad(given.detach(), (0, added))
            if is_padding:
                x = x.reshape(-1, 1, 1, S)  # (B, 1, 1, S)
            elif x.dim() == 3:
                x = x.reshape(-1, self._layer.num_heads, T, S)  # (B·H, T, S)
            if x.dtype == torch.bool:
                hidden = forbid(x.expand(*x.shape[:-2], T, S))
                mask = hidden if mask is None else mask & hidden
            else:
                bias = x if bias is None else bias + x
        return mask, bias

    def _batch_first(self, x: Tensor) -> Tensor:
        """(B, T, M), whatever way round the layer is used."""
        if x.dim() == 2:
            return x[None]
        return x if self._layer.batch_first else x.transpose(0, 1)
