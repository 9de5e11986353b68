"""Models and strategies that several tests of generation use."""

from __future__ import annotations

import torch

from clearhead.attention.scores import Scaled, SoftCapped
from clearhead.generation import BeamSearch, Greedy, Sample
from clearhead.masks import blocks, causal, dilated, every, full, per_head, prefix, scattered, window
from clearhead.models.baselines.recurrent import GRU, LSTM, NextToken, RecurrentConfig
from clearhead.models.baselines.recurrent_seq2seq import AfterStep, BeforeStep, RecurrentSeq2SeqConfig
from clearhead.nn import (
    GELU,
    Biases,
    Experts,
    GeGLU,
    Latent,
    Parallel,
    PostNorm,
    ReLU,
    ResPostNorm,
    RMSNorm,
    SandwichNorm,
    SiLU,
    SwiGLU,
)
from clearhead.nn.positions import ALiBi, LearnedPositions, NoPE, RelativeBias, Rotary, Sinusoidal, YarnScaling
from tests.generation.small import VOCAB, decoder, encoder_decoder, prompts, randomize

STRATEGIES = [Greedy(), Sample(1.2, top_k=11, top_p=0.95, min_p=0.01, seed=2), BeamSearch(3, n_best=2)]


def recurrent(cell=None):
    torch.manual_seed(7)
    cell = LSTM() if cell is None else cell
    config = RecurrentConfig(vocab_size=VOCAB, d_model=11, n_layers=2, cell=cell, task=NextToken())
    return randomize(config.build())


def seq2seq(attention):
    torch.manual_seed(9)
    config = RecurrentSeq2SeqConfig(source_vocab_size=19, vocab_size=VOCAB, d_model=11, attention=attention)
    return randomize(config.build())


DECODERS = {
    "learned": lambda: decoder(positions=LearnedPositions(max_len=61)),
    "sinusoidal": lambda: decoder(positions=Sinusoidal()),
    "rotary": lambda: decoder(positions=Rotary()),
    "alibi": lambda: decoder(positions=ALiBi()),
    "relative": lambda: decoder(positions=RelativeBias(bidirectional=False)),
    "none": lambda: decoder(positions=NoPE()),
    "grouped-query": lambda: decoder(n_heads=4, n_kv_heads=2, tie_embeddings=False),
    "window": lambda: decoder(mask=causal() & (window(3, 0) | dilated(5))),
    "every": lambda: decoder(mask=causal() & (window(2, 0) | every(4))),
    "blocks": lambda: decoder(mask=causal() & blocks(5)),
    "prefix": lambda: decoder(mask=causal() | prefix(4)),
    "ahead": lambda: decoder(mask=window(3, 1)),
    "lstm": recurrent,
    "gru": lambda: recurrent(GRU()),
}
ENCODER_DECODERS = {
    "sinusoidal": encoder_decoder,
    "learned": lambda: encoder_decoder(positions=LearnedPositions(max_len=61), max_len=61),
    "rotary": lambda: encoder_decoder(positions=Rotary()),
    "scattered": lambda: encoder_decoder(encoder_mask=scattered(3, seed=1) | window(1, 1)),
    "after-step": lambda: seq2seq(AfterStep()),
    "before-step": lambda: seq2seq(BeforeStep()),
}


FUSED_ONLY = {
    "post-norm": lambda: decoder(residual=PostNorm(), activation=ReLU()),
    "rms-swiglu": lambda: decoder(
        norm=RMSNorm(), activation=SwiGLU(), positions=Rotary(partial_rotary_factor=0.5), bias=False
    ),
    "embedding-norm": lambda: decoder(embedding_norm=True, scaled_embedding=True, activation=GELU(tanh=True)),
    "parallel": lambda: decoder(
        residual=Parallel(), norm=RMSNorm(unit_offset=True), qk_norm=RMSNorm(), activation=GeGLU()
    ),
    "some-biases": lambda: decoder(bias=Biases(k=False, out=False), activation=SiLU(slope=1.7)),
    "stretched": lambda: decoder(positions=Rotary(scaling=YarnScaling(factor=3.0, original_max_len=9))),
    "ring": lambda: decoder(mask=causal() & window(4, 0), positions=Rotary()),
    "ring-learned": lambda: decoder(mask=window(3, 0)),
    "ring-alibi": lambda: decoder(mask=causal() & window(4, 0), positions=ALiBi()),
    "ring-relative": lambda: decoder(mask=window(4, 0), positions=RelativeBias(bidirectional=False)),
    "sometimes-nothing": lambda: decoder(mask=causal() & dilated(3) & every(2)),
    "mask-per-head": lambda: decoder(
        n_heads=4, mask=causal() & per_head(window(4, 0), every(2), full(), window(1, 0)), positions=ALiBi()
    ),
    "sandwich": lambda: decoder(residual=SandwichNorm(), scores=SoftCapped(2.0), logit_softcap=3.0, norm=RMSNorm()),
    "layer-masks": lambda: decoder(layer_masks=(window(4, 0), full()), scores=SoftCapped(2.0), positions=Rotary()),
    "layer-rotary": lambda: decoder(positions=Rotary(), layer_rotary=(Rotary(), Rotary(base=77.0))),
    "experts": lambda: decoder(experts=Experts(5, top_k=2), activation=SwiGLU()),
    "shared-experts": lambda: decoder(experts=Experts(4, top_k=2, n_shared=1), n_dense_layers=1),
    "shared-norm": lambda: decoder(residual=Parallel(shared_norm=True), positions=Rotary()),
    "after-branch": lambda: decoder(residual=ResPostNorm(), qk_norm=RMSNorm(), qk_norm_all_heads=True),
    "multipliers": lambda: decoder(branch_multiplier=0.3, embedding_multiplier=2.0),
    "layer-scale": lambda: decoder(layer_scale=0.5),
    "sinks": lambda: decoder(sinks=True, positions=Rotary(), layer_masks=(window(4, 0), full())),
    "sinks-grouped": lambda: decoder(sinks=True, n_heads=4, n_kv_heads=2, positions=RelativeBias(bidirectional=False)),
    "latent": lambda: decoder(
        d_head=6, latent=Latent(kv_rank=5, q_rank=7, d_rope=4, d_value=3), positions=Rotary(), scores=SoftCapped(2.0)
    ),
    "latent-window": lambda: decoder(
        d_head=6, latent=Latent(kv_rank=5, d_rope=2, d_value=9), positions=Rotary(), mask=window(4, 0), bias=False
    ),
    "biases-per-layer": lambda: decoder(positions=RelativeBias(bidirectional=False), positions_per_layer=True),
    "scaled-logits": lambda: decoder(logit_scale=0.3, logit_bias=True, scores=Scaled(0.4)),
    "cross-sandwich": lambda: encoder_decoder(residual=SandwichNorm(), scores=SoftCapped(2.0)),
    "cross-grouped": lambda: encoder_decoder(n_heads=4, n_kv_heads=2, positions=RelativeBias(), share_embeddings=False),
    "cross-qk-norm": lambda: encoder_decoder(qk_norm=RMSNorm(), residual=Parallel()),
    "cross-sinks": lambda: encoder_decoder(sinks=True, positions=RelativeBias(), positions_per_layer=True),
    "cross-post-norm": lambda: encoder_decoder(residual=PostNorm(), positions=Sinusoidal()),
}
NOT_FUSED = {"lstm", "gru", "ahead", "after-step", "before-step"}
CASES = [
    *(("decoder", name, build) for name, build in DECODERS.items() if name not in NOT_FUSED),
    *(("encoder-decoder", name, build) for name, build in ENCODER_DECODERS.items() if name not in NOT_FUSED),
    *(
        ("encoder-decoder" if name.startswith("cross") else "decoder", name, build)
        for name, build in FUSED_ONLY.items()
    ),
]


def arguments(kind):
    return (prompts(VOCAB), None) if kind == "decoder" else (prompts(19), 4)


def assert_equal(a, b):
    assert torch.equal(a.lengths, b.lengths)
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.finished, b.finished)
    torch.testing.assert_close(a.log_probs, b.log_probs)
    torch.testing.assert_close(a.scores, b.scores)
