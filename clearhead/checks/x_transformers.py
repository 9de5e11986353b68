"""How the models of x-transformers are called. The library is not imported: its models are known by their names.

Its masks are True where a token is real; `seq_start_pos` says where each row begins. A cache is what the last call
returned, and a call that goes on from one says how many of its tokens are new (`cache_age`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from clearhead.checks.subject import Batch, Caching, Ids, Subject, Values
from clearhead.masks import Mask, causal, full, window


def guess(module: nn.Module) -> Subject | None:
    """The subject of a wrapper of x-transformers (whole models); None for its parts, and for anything else."""
    kind = type(module).__name__
    if not type(module).__module__.startswith("x_transformers."):
        return None
    model: Any = module
    if kind == "ViTransformerWrapper":
        return _pictures(model)
    if kind == "XTransformer":
        return _pair(model)
    if kind == "TransformerWrapper" and not model.attn_layers.cross_attend:
        return _text(model)
    return None


class _Kept:
    """What the last call returned: keys and values of every layer."""

    def __init__(self) -> None:
        self.last: Any = None

    def _change(self, change: Any) -> None:
        for layer in self.last.attn_intermediates:
            if layer.cached_kv is not None:
                layer.cached_kv = tuple(change(x) for x in layer.cached_kv)

    def reorder(self, rows: Tensor) -> None:
        self._change(lambda x: x[rows])

    def truncate(self, length: int) -> None:
        self._change(lambda x: x[..., :length, :])
        self.last.cache_length = length


def _text(model: Any) -> Subject:
    layers = model.attn_layers
    return Subject(
        model, name=f"x-transformers {type(layers).__name__}", inputs=Ids(_vocabulary(model)), run=_run_text,
        sees=_sees(layers), layers=sum(type(part).__name__ == "Attention" for part in layers.modules()),
        positions=True, pads=True, caching=Caching(new=_Kept) if layers.causal else None, max_len=model.max_seq_len,
    )  # fmt: skip


def _pair(model: Any) -> Subject:
    net = model.decoder.net
    return Subject(
        model, name="x-transformers XTransformer", inputs=Ids(_vocabulary(net)),
        source=Ids(_vocabulary(model.encoder)), run=_run_pair, sees=_sees(net.attn_layers), positions=True,
        pads=True, pads_target=True, max_len=min(net.max_seq_len, model.encoder.max_seq_len),
    )  # fmt: skip


def _pictures(model: Any) -> Subject:
    places, values = model.pos_embedding.shape[1], model.patch_to_embedding[1].in_features
    side = model.patch_size * round(places**0.5)
    return Subject(model, name="x-transformers ViT", inputs=Values((values // model.patch_size**2, side, side)))


def _vocabulary(model: Any) -> int:
    size: int = model.token_emb.emb.num_embeddings
    return size


def _sees(layers: Any) -> Mask:
    if not layers.causal:
        return full()
    reach = [getattr(part, "max_attend_past", None) for part in layers.modules()]
    limits = [n for n in reach if n is not None]
    return causal() & window(max(limits), 0) if limits else causal()


def _padding(keep: Tensor | None) -> dict[str, Any]:
    if keep is None:
        return {}
    first = keep.int().argmax(1)
    return {"mask": keep, **({"seq_start_pos": first} if bool(first.any()) else {})}


def _run_text(model: Any, batch: Batch) -> Any:
    if batch.cache is None:
        return model(batch.x, **_padding(batch.keep))
    last = batch.cache.last
    new = {} if last is None else {"cache": last, "input_not_include_cache": True, "cache_age": batch.x.shape[1]}
    out, batch.cache.last = model(batch.x, return_intermediates=True, **new, **_padding(batch.keep))
    return out


def _run_pair(model: Any, batch: Batch) -> Any:
    memory = model.encoder(batch.source, return_embeddings=True, **_padding(batch.source_keep))
    told = {} if batch.source_keep is None else {"context_mask": batch.source_keep}
    return model.decoder.net(batch.x, context=memory, **told, **_padding(batch.keep))
