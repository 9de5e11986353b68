"""Represent torch's attention layer as an attention call.

`nn.MultiheadAttention` takes bool masks in which True is hidden, and float masks that are added. They become the mask
and bias of `AttentionInputs`, from which weights are recomputed as for clearhead's layers.
"""

from __future__ import annotations

import inspect
import math
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._core.call_types import Args, Kwargs
from clearhead._core.json_types import JSONObject
from clearhead.analysis.tracing.recompute import AttentionCall, VersionedRef, dropout_of
from clearhead.attention import ScaledDot, Softmax
from clearhead.attention.inputs import AttentionInputs
from clearhead.masks import Mask, forbid


def to_padded(x: Tensor) -> Tensor:
    """Convert a nested tensor to a padded one; return other tensors unchanged."""
    return torch.nested.to_padded_tensor(x, 0.0) if x.is_nested else x


def nested_padding(x: Tensor) -> Tensor:
    """Return the padding mask (B, T) of a nested tensor of B sequences: True is padding."""
    lengths = torch.tensor([len(row) for row in x.unbind()], device=x.device)
    return torch.arange(int(lengths.max()), device=x.device) >= lengths[:, None]


class TorchLayerCall(AttentionCall):
    """One recorded call of `nn.MultiheadAttention`: its inputs and its output (B, T, M).

    Queries, keys and values are projected again on demand with the layer's parameters. If these were modified in
    between, for example by an optimizer, reading raises ConfigError.
    """

    heads_merged: ClassVar[bool] = True

    def __init__(self, layer: nn.MultiheadAttention, arguments: Kwargs, output: Tensor) -> None:
        self._layer = layer
        self._inputs: list[Tensor] = [to_padded(arguments[name]) for name in ("query", "key", "value")]
        self._padding: Tensor | None = arguments.get("key_padding_mask")
        self._mask: Tensor | None = arguments.get("attn_mask")
        if output.is_nested:  # rows of padding get the output of zero heads
            hidden = nested_padding(output)
            bias = layer.out_proj.bias
            output = torch.where(hidden[..., None], 0.0 if bias is None else bias.detach(), to_padded(output))
            self._mask = hidden[:, None, :, None].expand(-1, layer.num_heads, -1, output.shape[1]).flatten(0, 1)
        self._out = output
        self._edited_heads: Tensor | None = None
        self._keeps_graph = True
        self._inputs_ref = VersionedRef("an input of this nn.MultiheadAttention", *self._inputs)
        self._parameters_ref = VersionedRef("a parameter of this nn.MultiheadAttention", *layer.parameters())
        self._outputs_ref = VersionedRef("the output of this nn.MultiheadAttention", output)

    @staticmethod
    def bind_arguments(layer: nn.MultiheadAttention, args: Args, kwargs: Kwargs) -> JSONObject:
        """Return the layer's arguments by name."""
        arguments = dict(inspect.signature(layer.forward).bind(*args, **kwargs).arguments)
        if arguments["key"].is_nested:  # created by nn.TransformerEncoder from padded batches
            arguments["key_padding_mask"] = nested_padding(arguments["key"])
        return arguments

    @property
    def implementation(self) -> str:
        return "nn.MultiheadAttention"

    def detached(self, edited: Tensor | None) -> TorchLayerCall:
        """Return a copy without autograd graph for storage; `edited` are its heads after interventions."""
        query, key, value = (x.detach() for x in self._inputs)
        arguments = {
            "query": query,
            "key": key,
            "value": value,
            "key_padding_mask": self._padding,
            "attn_mask": self._mask,
        }
        detached = TorchLayerCall(self._layer, arguments, self._out.detach())
        detached._edited_heads = None if edited is None else edited.detach()
        detached._keeps_graph = False
        return detached

    def layer_output(self, heads: Tensor) -> Tensor:
        """Return the output of the layer, in its own layout, for these head outputs."""
        out = self.merge_heads(heads)
        return out[0] if self._out.dim() == 2 else out if self._layer.batch_first else out.transpose(0, 1)

    @cached_property
    def out(self) -> Tensor:
        self._outputs_ref.check()
        return self._batch_first(self._out)

    @cached_property
    def call(self) -> AttentionInputs:
        layer = self._layer
        self._parameters_ref.check()
        self._inputs_ref.check()
        with torch.set_grad_enabled(self._keeps_graph and torch.is_grad_enabled()):
            q, k, v, n_appended = self._projected()  # (B, H, T, D)
        mask, bias = self._mask_and_bias(n_appended)
        return AttentionInputs(
            q, k, v, mask, ScaledDot(), Softmax(dropout=layer.dropout if layer.training else 0.0), bias, 0
        )

    def heads(self) -> Tensor:
        """Return the head outputs (B, H, T, D).

        They are recomputed by torch's function, because the layer returns only their sum.
        """
        if self._edited_heads is not None:
            return self._edited_heads
        call = self.call
        allowed = call.allowed()
        if call.bias is not None:
            bias = call.bias.to(call.q.dtype)
            allowed = bias if allowed is None else bias.masked_fill(~allowed, -math.inf)
        return F.scaled_dot_product_attention(call.q, call.k, call.v, attn_mask=allowed, dropout_p=dropout_of(call))

    def merge_heads(self, heads: Tensor) -> Tensor:
        """Apply the layer's output projection: (B, H, r, D) → (B, r, M)."""
        projection = self._layer.out_proj
        bias = None if projection.bias is None else projection.bias.to(heads.dtype)
        return F.linear(heads.transpose(-2, -3).flatten(-2), projection.weight.to(heads.dtype), bias)

    def _projected(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return queries, keys and values, including those that the layer appends, and the number of appended ones."""
        layer = self._layer
        separate = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        matrices = separate if layer.in_proj_weight is None else layer.in_proj_weight.chunk(3)
        biases = (None, None, None) if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
        products = map(F.linear, map(self._batch_first, self._inputs), matrices, biases)
        q, k, v = (x.unflatten(-1, (layer.num_heads, -1)).transpose(-2, -3) for x in products)
        before = k.shape[-2]
        if layer.bias_k is not None and layer.bias_v is not None:
            bias_k = layer.bias_k.reshape(1, layer.num_heads, 1, -1).expand(len(k), -1, -1, -1)
            bias_v = layer.bias_v.reshape(1, layer.num_heads, 1, -1).expand(len(v), -1, -1, -1)
            k = torch.cat((k, bias_k), -2)
            v = torch.cat((v, bias_v), -2)
        if layer.add_zero_attn:
            k = F.pad(k, (0, 0, 0, 1))
            v = F.pad(v, (0, 0, 0, 1))
        return q, k, v, k.shape[-2] - before

    def _mask_and_bias(self, n_appended: int) -> tuple[Mask | None, Tensor | None]:
        """Combine both masks of torch's layer, each either bool (True is hidden) or a float that is added."""
        T = self.out.shape[-2]
        S = self._batch_first(self._inputs[1]).shape[-2] + n_appended
        mask: Mask | None = None
        bias: Tensor | None = None
        for layer_mask, is_padding in ((self._mask, False), (self._padding, True)):
            if layer_mask is None:
                continue
            x = F.pad(layer_mask.detach(), (0, n_appended))
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
        """Return (B, T, M) for any layout of the layer."""
        if x.dim() == 2:
            return x[None]
        return x if self._layer.batch_first else x.transpose(0, 1)
