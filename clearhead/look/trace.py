"""What attention layers were given in a run, and the weights that follow from it.

The run itself stays on the fast path, which never has the weights. A trace keeps the inputs of the layers asked for, by
module path, and the weights are recomputed from them with the reference equation, when they are asked for.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._shapes import Float
from clearhead.attention import MultiHeadAttention, attend
from clearhead.errors import ConfigError, ShapeError
from clearhead.masks import Mask


@dataclass(frozen=True)
class _Given:
    """The arguments of one call of an attention layer, and what it returned."""

    query: Tensor
    key: Tensor | None
    mask: Mask | None
    bias: Tensor | None
    output: Tensor


class Trace:
    """A recording of attention layers. Use it in a `with` block; the last call of each layer is kept."""

    def __init__(self, model: nn.Module, pattern: str = "*") -> None:
        self._layers = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, MultiHeadAttention) and fnmatch.fnmatchcase(path, pattern)
        }
        if not self._layers:
            known = [path for path, module in model.named_modules() if isinstance(module, MultiHeadAttention)]
            raise ConfigError(
                f"no attention layer is called {pattern!r}; this model has: {', '.join(known) or 'none'}"
            )
        self._given: dict[str, _Given] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def paths(self) -> list[str]:
        """The layers that are recorded."""
        return list(self._layers)

    def __enter__(self) -> Trace:
        for path, layer in self._layers.items():
            self._handles.append(layer.register_forward_hook(self._keeper(path), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _keeper(self, path: str) -> Callable[..., None]:
        def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if kwargs.get("cache") is not None:
                raise ConfigError("a trace records whole sequences; run the model without a cache")
            key = args[1] if len(args) > 1 else kwargs.get("key")
            self._given[path] = _Given(
                args[0] if args else kwargs["query"], key, kwargs.get("mask"), kwargs.get("bias"), output
            )

        return keep

    @torch.no_grad()
    def weights(self, path: str) -> Float[Tensor, "B H T S"]:
        """Who attended to whom in this layer, recomputed from its inputs by the reference equation."""
        layer, given = self._layer(path), self._call(path)
        q, k = self._queries_keys(layer, given)
        eye = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device).expand(*k.shape[:-1], k.shape[-2])
        return attend(
            q,
            k,
            eye,  # with the identity as values, the output is the weights
            given.mask,
            scores=layer.scores,
            weights=layer.weights,
            bias=given.bias,
            impl="reference",
        )

    @torch.no_grad()
    def difference(self, path: str) -> float:
        """The largest difference between the layer's output and its output recomputed from `weights`."""
        layer, given = self._layer(path), self._call(path)
        source = given.query if given.key is None else given.key
        v = layer._split(layer.v_proj(source), layer.n_kv_heads)
        v = v.repeat_interleave(layer.n_heads // layer.n_kv_heads, dim=-3)
        out = layer.o_proj((self.weights(path) @ v).transpose(-2, -3).flatten(-2))
        return float((out - given.output).abs().max())

    def _queries_keys(self, layer: MultiHeadAttention, given: _Given) -> tuple[Tensor, Tensor]:
        source = given.query if given.key is None else given.key
        q = layer._rotate(layer._split(layer.q_proj(given.query), layer.n_heads), None)
        k = layer._rotate(layer._split(layer.k_proj(source), layer.n_kv_heads), None)
        return q, k

    def _layer(self, path: str) -> MultiHeadAttention:
        if path not in self._layers:
            raise ConfigError(f"{path!r} is not recorded; recorded are: {', '.join(self._layers)}")
        return self._layers[path]

    def _call(self, path: str) -> _Given:
        if path not in self._given:
            raise ShapeError(
                f"{path} has not run inside this trace; call the model in its `with` block first"
            )
        return self._given[path]


def trace(model: nn.Module, pattern: str = "*") -> Trace:
    """Record the attention layers whose module path matches `pattern` (`*` stands for anything)."""
    return Trace(model, pattern)
