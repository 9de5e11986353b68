"""Masks as the sources write them: causal, padding, and where each one belongs."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from clearhead.attention import attend
from clearhead.claims.figure import Grid
from clearhead.claims.ledger import Trial, claim
from clearhead.claims.sources import ANSWERED, EXERCISES, HOMEWORK
from clearhead.masks import padding
from clearhead.models import DecoderConfig, EncoderConfig, EncoderDecoderConfig
from clearhead.positions import NoPositions

SIZES: dict[str, Any] = {"vocab_size": 11, "d_model": 8, "n_heads": 2, "d_ff": 16}


def column_attention(n: int, generator: torch.Generator) -> Tensor:
    """The homework's masked weights: rows are keys j, columns are queries i, and M_ji = −∞ for j > i."""
    s = torch.randn(n, n, generator=generator, dtype=torch.float64)
    j, i = torch.arange(n)[:, None], torch.arange(n)[None, :]
    return (s + torch.where(j > i, -torch.inf, 0.0)).softmax(dim=0)


@claim(
    "causal-zero-future",
    HOMEWORK,
    "1.3e",
    "Adding −∞ to the scores of later keys makes their weights exactly 0 and leaves a distribution over the rest.",
    method="The formula as printed, 7 positions, in float64.",
)
def causal_zero_future(t: Trial) -> None:
    a = column_attention(7, t.generator)
    later = torch.arange(7)[:, None] > torch.arange(7)[None, :]
    t.case("weights of later keys", f"largest {a[later].max():g}", a[later].eq(0).all())
    t.case(
        "column sums",
        f"{a.sum(0).min():.12f} … {a.sum(0).max():.12f}",
        torch.allclose(a.sum(0), torch.ones(7, dtype=a.dtype)),
    )


@claim(
    "causal-lower-triangular",
    HOMEWORK,
    "1.3e, result",
    "With that mask A is lower triangular.",
    method="A as the homework defines it (rows are keys, columns are queries), 2 positions.",
)
def causal_lower_triangular(t: Trial) -> None:
    a = column_attention(2, t.generator)
    t.case(
        "entry above the diagonal (key 1, query 2)",
        f"{a[0, 1]:.3f}; below it (key 2, query 1): {a[1, 0]:.0f}",
        a.triu(1).eq(0).all(),
    )
    b = column_attention(5, t.generator)
    t.draw(Grid("A by the homework's columns", b.tolist()))
    t.instead(
        "With keys as rows and queries as columns it is upper triangular; its transpose is lower triangular.",
        b.tril(-1).eq(0).all() and b.triu().ne(0).sum() == 15,
    )


@claim(
    "mask-times-infinity",
    ANSWERED,
    "Q2b, line 24 and 'masking types'",
    "Masking is scores + mask × (−∞), with a mask of −∞ for hidden pairs and 0 for the others.",
    method="The line as printed, two positions, in floating point; and with a mask of ones for hidden pairs.",
)
def mask_times_infinity(t: Trial) -> None:
    scores = torch.zeros(2, 2)
    mask = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    printed = (scores + mask * -torch.inf).softmax(-1)
    t.case("its own mask, two positions: weights", printed.tolist(), printed.isfinite().all())
    ones = (scores + mask.isinf().float() * -torch.inf).softmax(-1)
    t.case("a mask of ones for hidden pairs", ones.tolist(), ones.isfinite().all())
    added = (scores + mask).softmax(-1)
    t.instead(
        "The mask of 0 and −∞ is added as it is (0 × ∞ is not a number).", added.tolist() == [[1.0, 0.0], [0.5, 0.5]]
    )


@claim(
    "padding-mask",
    ANSWERED,
    "Q2b, padding mask",
    "A mask of −∞ at padded keys keeps padding out of the result.",
    method="3 real keys and 2 padded ones: their contents are replaced by large numbers.",
)
def padding_mask(t: Trial) -> None:
    q, k, v = (torch.randn(1, 1, 5, 4, generator=t.generator, dtype=torch.float64) for _ in range(3))
    mask = padding(torch.tensor([3]))
    before = attend(q, k, v, mask)
    k[:, :, 3:], v[:, :, 3:] = 50.0, -1e6
    gap = (attend(q, k, v, mask) - before).abs().max().item()
    t.case("padding replaced by 50 and −10⁶", f"output changes by {gap:.1e}", gap == 0)
    t.case(
        "the same without a mask",
        f"{(attend(q, k, v) - before).abs().max():.1e}",
        (attend(q, k, v) - before).abs().max() > 1,
    )


def _ids(t: Trial, *shape: int) -> Tensor:
    return torch.randint(1, 11, shape, generator=t.generator)


@claim(
    "encoder-masks",
    EXERCISES,
    "2(b)(i)",
    "An encoder for classification needs the key padding mask in its self-attention, and no other.",
    method="A text alone, and padded on the right with two kinds of padding, with and without the mask.",
)
def encoder_masks(t: Trial) -> None:
    model = EncoderConfig(**SIZES, n_layers=2, positions=NoPositions()).build().double().eval()
    ids = _ids(t, 1, 5)
    alone = model(ids)
    long = torch.cat([ids, _ids(t, 1, 3)], 1)
    masked = (model(long, mask=padding(torch.tensor([5])))[:, :5] - alone).abs().max().item()
    bare = (model(long)[:, :5] - alone).abs().max().item()
    t.case("with the padding mask", f"changes by {masked:.1e}", masked < 1e-12)
    t.case("without it padding is felt", f"changes by {bare:.1e}", bare > 1e-6)


@claim(
    "decoder-masks",
    EXERCISES,
    "2(b)(ii)",
    "A decoder needs the causal mask only; with padding on the right a key padding mask is not needed.",
    method="A text alone and padded on the right, through a two-layer decoder; then padded on the left.",
)
def decoder_masks(t: Trial) -> None:
    model = DecoderConfig(**SIZES, n_layers=2, positions=NoPositions()).build().double().eval()
    ids, pad = _ids(t, 1, 5), _ids(t, 1, 3)
    alone = model(ids)
    right = (model(torch.cat([ids, pad], 1))[:, :5] - alone).abs().max().item()
    left = (model(torch.cat([pad, ids], 1))[:, 3:] - alone).abs().max().item()
    t.case("padding on the right", f"changes by {right:.1e}", right < 1e-12)
    t.note(f"padding on the left would be felt: changes by {left:.1e}")


@claim(
    "encoder-decoder-masks",
    EXERCISES,
    "2(b)(iii)",
    "For translation the key padding mask goes into the encoder's self-attention and into cross-attention; the "
    "decoder needs only its causal mask if padding is on the right.",
    method="A small encoder-decoder: each of the two padding masks left out in turn; target padded on the right.",
)
def encoder_decoder_masks(t: Trial) -> None:
    model = EncoderDecoderConfig(**SIZES, n_encoder_layers=1, n_decoder_layers=1, positions=NoPositions())
    net = model.build().double().eval()
    source, target = _ids(t, 1, 4), _ids(t, 1, 5)
    padded, mask = torch.cat([source, _ids(t, 1, 3)], 1), padding(torch.tensor([4]))
    alone = net(source, target)

    def change(in_encoder: bool, in_cross: bool) -> float:
        memory = net.encode(padded, mask=mask if in_encoder else None)
        out = net.decode(target, memory, memory_mask=mask if in_cross else None)
        return (out - alone).abs().max().item()

    t.case("both masks", f"changes by {change(True, True):.1e}", change(True, True) < 1e-12)
    t.case("none in cross-attention: padding is felt", f"{change(True, False):.1e}", change(True, False) > 1e-8)
    t.case("none in the encoder: padding is felt", f"{change(False, True):.1e}", change(False, True) > 1e-8)
    longer = net(source, torch.cat([target, _ids(t, 1, 2)], 1))[:, :5]
    t.case(
        "target padded on the right, causal only",
        f"{(longer - alone).abs().max():.1e}",
        torch.allclose(longer, alone, atol=1e-12),
    )


@claim(
    "self-attention-reads-encoder",
    HOMEWORK,
    "1.4b.6",
    "In the decoder self-attention also serves to attend to the encoder's representations.",
    method="The source of a small encoder-decoder is replaced: which attention of the decoder changes?",
)
def self_attention_reads_encoder(t: Trial) -> None:
    config = EncoderDecoderConfig(**SIZES, n_encoder_layers=1, n_decoder_layers=1, positions=NoPositions())
    net = config.build().double().eval()
    given: dict[str, list[Tensor]] = {"self-attention": [], "cross-attention": []}
    for name, part in zip(given, ("attention", "cross_attention"), strict=True):
        net.get_submodule(f"decoder.blocks.0.{part}").register_forward_hook(
            lambda _, __, out, name=name: given[name].append(out)
        )
    target = _ids(t, 1, 5)
    for source in (_ids(t, 1, 4), _ids(t, 1, 4)):
        net(source, target)
    change = {name: (a - b).abs().max().item() for name, (a, b) in given.items()}
    t.case("self-attention: output changes by", f"{change['self-attention']:.1e}", change["self-attention"] > 0)
    t.instead(
        "That is cross-attention, with queries of the decoder and keys and values of the encoder; self-attention reads "
        "the decoder's own sequence.",
        change["self-attention"] == 0 < change["cross-attention"],
    )


@claim(
    "causal-streams",
    HOMEWORK,
    "1.3e, result",
    "With causal masking the input can be processed as a stream: what was put out need not be revised when "
    "more arrives.",
    method="A decoder of two layers on 9 tokens and on each beginning of them; then an encoder, which has no mask.",
)
def causal_streams(t: Trial) -> None:
    ids = torch.randint(11, (1, 9), generator=t.generator)
    sizes = SIZES | {"max_len": 16, "n_layers": 2}
    for model, masked in ((DecoderConfig(**sizes).build(), True), (EncoderConfig(**sizes).build(), False)):
        model = model.double().eval()
        with torch.no_grad():
            whole = model(ids)
            moved = max((model(ids[:, :n]) - whole[:, :n]).abs().max().item() for n in range(1, 9))
        what = "masked" if masked else "not masked, every earlier output is revised"
        t.case(f"{what}: largest change", f"{moved:.1e}", (moved < 1e-12) == masked)


@claim(
    "causal-speech",
    HOMEWORK,
    "1.3e",
    "Attention without a mask does not suit speech in real time; causal attention does.",
    method="Redrawn from results/study-speech.json, which comes with the package: one small encoder under four masks "
    "on streams of spoken digits, three seeds, trained on a GPU; `clearhead bench study speech` makes it again.",
)
def causal_speech(t: Trial) -> None:
    text = (resources.files("clearhead.claims") / "results" / "study-speech.json").read_text(encoding="utf-8")
    rows = [row for row in json.loads(text)["rows"] if row["panel"] == "known speakers"]
    for sees in dict.fromkeys(row["line"] for row in rows):
        curves = [row["curve"] for row in rows if row["line"] == sees]
        waits = [wait for curve in curves if (wait := curve["seconds to wait (95 %)"]) is not None]
        if sees == "everything":
            t.case("no mask: digits that are known before a recording ends", "some" if waits else "none", not waits)
        else:
            what = f"it sees {sees}: seconds until 95 % of the digits are written down"
            t.case(what, f"{max(waits):.2f}", max(waits) <= 0.5)
        wrong = [curve["digits wrong in streams"] for curve in curves]
        t.note(f"{sees}: {min(wrong):.1%} to {max(wrong):.1%} of the digits wrong")
