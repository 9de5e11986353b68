"""The beam search panel: every prefix that a beam search kept, as a tree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor

from clearhead._core.json_types import JSONObject
from clearhead._core.validation import Range, require
from clearhead.explorer.model_input import ModelRequest, encode_input, max_tokens
from clearhead.explorer.request import RequestContext, action
from clearhead.generation import BeamSearch, search
from clearhead.generation.decoder import IncrementalDecoder
from clearhead.generation.model_decoders import incremental_decoder
from clearhead.generation.request import SearchRequest
from clearhead.models import Decoder, EncoderDecoder


@dataclass(frozen=True, kw_only=True)
class BeamSearchRequest(ModelRequest):
    """An input and the settings of beam search."""

    width: Annotated[int, Range(ge=1, le=8)] = 3
    max_new_tokens: Annotated[int, Range(ge=1, le=48)] = 12
    length_penalty: Annotated[float, Range(ge=-2, le=4)] = 1.0


class TreeNode(TypedDict):
    """A prefix that beam search kept: its parent, last id, and the id's log-probability."""

    parent: int | None
    id: int
    log_prob: float


class _BeamTree:
    """An incremental decoder that records every prefix that beam search kept, and delegates to another decoder."""

    def __init__(self, decoder: IncrementalDecoder, context: RequestContext, max_new_tokens: int) -> None:
        self.nodes: list[TreeNode] = []
        self._decoder = decoder
        self._context = context
        self._max_new_tokens = max_new_tokens
        self._n_steps = 0
        self._rows: list[int | None] = []  # node of each row
        self._nodes_by_key: dict[tuple[int | None, int], int] = {}

    def prefill(self) -> Tensor:
        """Process the prompt."""
        self._logits: Tensor = self._decoder.prefill()
        self._rows = [None] * len(self._logits)
        return self._logits

    def decode_step(self, ids: Tensor) -> Tensor:
        """Append one token per row, and record it."""
        self._n_steps += 1
        self._context.checkpoint(self._n_steps, self._max_new_tokens, f"{self._n_steps} tokens")
        log_probs = self._logits.float().log_softmax(-1)
        self._rows = [
            self.node(parent, i, float(log_probs[row, i]))
            for row, (parent, i) in enumerate(zip(self._rows, ids.tolist(), strict=True))
        ]
        self._logits = self._decoder.decode_step(ids)
        return self._logits

    def reorder_cache(self, rows: Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        self._rows = [self._rows[i] for i in rows.tolist()]
        self._logits = self._logits.index_select(0, rows.to(self._logits.device))
        self._decoder.reorder_cache(rows)

    def node(self, parent: int | None, id_: int, log_prob: float) -> int:
        """Return the index of a node; add it if it is new."""
        key = (parent, id_)
        if key not in self._nodes_by_key:
            self._nodes_by_key[key] = len(self.nodes)
            self.nodes.append(TreeNode(parent=parent, id=id_, log_prob=log_prob))
        return self._nodes_by_key[key]


@action(BeamSearchRequest)
@torch.no_grad()
def beam_search(request: BeamSearchRequest, context: RequestContext) -> JSONObject:
    """Return all prefixes that beam search kept, as a tree, and its final hypotheses."""
    encoded = encode_input(request, context)
    encoded = replace(encoded, ids=encoded.ids[: encoded.n_prompt])  # the search starts after the prompt
    model: Any = encoded.pipeline.model
    can_generate = isinstance(model, (Decoder, EncoderDecoder))
    require(can_generate, f"{request.model} does not generate text; choose a decoder or an encoder-decoder")
    n_positions = max_tokens(model, 1 << 30) - len(encoded.ids)
    require(n_positions >= 1, "the context is full; remove a token or shorten the text")
    max_new_tokens = min(request.max_new_tokens, n_positions)
    strategy = BeamSearch(request.width, length_penalty=request.length_penalty, n_best=request.width)
    stop_ids = encoded.pipeline.stop_ids
    start_ids = encoded.ids if encoded.source_ids else None
    search_request = SearchRequest.of(strategy, max_new_tokens, stop_ids, decoder_start_ids=start_ids)
    decoder = incremental_decoder(model, encoded.inputs[0], search_request)
    tree = _BeamTree(decoder, context, max_new_tokens)
    output = search(tree, strategy=strategy, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    hypotheses = []
    for rank in range(request.width):
        ids = output.sequence(0, rank, with_stop=True).tolist()
        if not ids:
            continue
        nodes: list[int] = []
        for i, log_prob in zip(ids, output.log_probs[0, rank].tolist(), strict=False):
            nodes.append(tree.node(nodes[-1] if nodes else None, i, log_prob))
        hypotheses.append(
            {
                "nodes": nodes,
                "text": encoded.decode(ids),
                "score": float(output.scores[0, rank]),
                "is_finished": bool(output.finished[0, rank]),
            }
        )
    names = encoded.pipeline.tokenizer.tokens([node["id"] for node in tree.nodes]) if tree.nodes else []
    named_nodes = [{**node, "token": name} for node, name in zip(tree.nodes, names, strict=True)]
    return {"nodes": named_nodes, "hypotheses": hypotheses}
