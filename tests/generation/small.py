"""Small random float64 models whose predictions differ between positions, so that ids can be compared exactly."""

from __future__ import annotations

import torch

from clearhead.masks import causal
from clearhead.models.decoder import DecoderConfig
from clearhead.models.encoder_decoder import EncoderDecoderConfig
from clearhead.nn.positions import LearnedPositions, Sinusoidal

VOCAB = 23
STOP = 7


def randomize(model):
    """Draw larger parameters than an initialization, because an untrained model predicts nearly the same everywhere."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.5)
    return model.double()


def decoder(*, positions=None, mask=None, **changes):
    torch.manual_seed(3)
    positions = LearnedPositions(max_len=61) if positions is None else positions
    config = DecoderConfig(
        vocab_size=VOCAB,
        d_model=12,
        n_heads=3,
        n_layers=2,
        d_ff=17,
        max_len=61,
        dropout=0.3,
        positions=positions,
        mask=causal() if mask is None else mask,
    )
    return randomize(config.replace(**changes).build())


def encoder_decoder(**changes):
    torch.manual_seed(5)
    config = EncoderDecoderConfig(
        vocab_size=VOCAB,
        source_vocab_size=19,
        d_model=12,
        n_heads=3,
        d_ff=17,
        n_encoder_layers=2,
        n_decoder_layers=2,
        dropout=0.3,
        positions=Sinusoidal(),
    )
    return randomize(config.replace(**changes).build())


def prompts(vocab, lengths=(5, 2, 11, 2, 1, 7)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (n,), generator=generator) for n in lengths]


def next_log_probs(model, prompt, start=None):
    """Return a function for one row's next-id log-probabilities, without padding, cache or batch, for `tables`."""
    model.eval()
    source = torch.as_tensor(prompt)[None]

    @torch.no_grad()
    def after(ids):
        ids = torch.tensor([ids])
        out = model(ids) if start is None else model(source, ids)
        return out[0, -1].log_softmax(-1).tolist()

    def logits(ids):
        return torch.tensor([after(row) for row in ids.tolist()])

    logits.log_probs_after = after
    return logits
