"""Masks as the sources write them: causal, padding, and where each one belongs."""

from __future__ import annotations

import json
from importlib import resources

import torch
from torch import Tensor

from clearhead.attention import attend
from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import MatrixFigure
from clearhead.course.claims.numerics import max_abs_diff
from clearhead.course.claims.registry import ANSWERED, EXERCISES, HOMEWORK, claim
from clearhead.masks import causal, full, padding
from clearhead.models import DecoderConfig, EncoderConfig, EncoderDecoder, EncoderDecoderConfig
from clearhead.nn.positions import NoPE

DECODER = DecoderConfig(vocab_size=11, d_model=8, n_heads=2, d_ff=16, n_layers=2)
ENCODER = EncoderConfig(vocab_size=11, d_model=8, n_heads=2, d_ff=16, n_layers=2)


def column_attention(n: int, generator: torch.Generator) -> Tensor:
    """Return the masked weights of the homework: rows are keys j, columns are queries i, and M_ji = −∞ for j > i."""
    s = torch.randn(n, n, generator=generator, dtype=torch.float64)
    return s.masked_fill(torch.ones(n, n).tril(-1).bool(), -torch.inf).softmax(dim=0)


@claim(
    HOMEWORK,
    "1.3e",
    statement=(
        "Adding −∞ to the scores of later keys makes their weights exactly 0 and leaves a distribution over the rest."
    ),
    method="The formula as printed, 7 positions, in float64.",
)
def causal_zero_future(t: Experiment) -> None:
    a = column_attention(7, t.generator)
    t.assert_equal("weights of later keys", a.tril(-1).max().item(), 0, "largest {:g}")
    low, high = a.sum(0).aminmax()
    t.record_case("column sums", f"{low:.12f} … {high:.12f}", max(1 - low, high - 1) < 1e-12)


@claim(
    HOMEWORK,
    "1.4a.2 and 1.4b.1",
    statement="In a Transformer every token can attend directly to every other token.",
    method="Pairs of query and key that an encoder and a decoder allow, 5 tokens, counted by the masks.",
    condition="no mask hides tokens, as in an encoder; in a decoder a token attends to earlier tokens and itself",
)
def every_token_attends(t: Experiment) -> None:
    for name, mask in (("encoder", full()), ("decoder", causal())):
        t.assert_equal(name, mask.count(5), 25, "{} of 25 pairs", in_scope=name == "encoder")


@claim(
    HOMEWORK,
    "1.3e, result",
    statement="With that mask A is lower triangular.",
    method="A as the homework defines it (rows are keys, columns are queries), 2 positions.",
)
def causal_lower_triangular(t: Experiment) -> None:
    a, b = (column_attention(n, t.generator) for n in (2, 5))
    result_text = f"{a[0, 1]:.3f}; below it (key 2, query 1): {a[1, 0]:.0f}"
    t.record_case("entry above the diagonal (key 1, query 2)", result_text, a.triu(1).eq(0).all())
    t.draw(MatrixFigure("A by the homework's columns", b.tolist()))
    correct = "With keys as rows and queries as columns it is upper triangular; its transpose is lower triangular."
    t.correction(correct, b.tril(-1).eq(0).all() and b.triu().ne(0).sum() == 15)


@claim(
    ANSWERED,
    "Q2b, line 24 and 'masking types'",
    statement="Masking is scores + mask × (−∞), with a mask of −∞ for hidden pairs and 0 for the others.",
    method="The line as printed, two positions, in floating point; and with a mask of ones for hidden pairs.",
)
def mask_times_infinity(t: Experiment) -> None:
    mask = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    inputs = {"its own mask, two positions: weights": mask, "a mask of ones for hidden pairs": mask.isinf()}
    for name, hidden in inputs.items():
        printed = (hidden * -torch.inf).softmax(-1)  # of scores that are all 0
        t.record_case(name, printed.tolist(), printed.isfinite().all())
    correct = "The mask of 0 and −∞ is added as it is (0 × ∞ is not a number)."
    t.correction(correct, mask.softmax(-1).tolist() == [[1.0, 0.0], [0.5, 0.5]])


@claim(
    ANSWERED,
    "Q2b, padding mask",
    statement="A mask of −∞ at padded keys keeps padding out of the result.",
    method="3 real keys and 2 padded ones: their contents are replaced by large numbers.",
)
def padding_mask(t: Experiment) -> None:
    q, k, v = (t.normal(1, 1, 5, 4) for _ in range(3))
    mask = padding(torch.tensor([3]))
    before = attend(q, k, v, mask)
    k[:, :, 3:], v[:, :, 3:] = 50.0, -1e6
    t.assert_equal(
        "padding replaced by 50 and −10⁶", max_abs_diff(attend(q, k, v, mask), before), 0, "output changes by {:.1e}"
    )
    t.assert_above("the same without a mask", max_abs_diff(attend(q, k, v), before), 1)


def _encoder_decoder() -> EncoderDecoder:
    config = EncoderDecoderConfig(
        vocab_size=11, d_model=8, n_heads=2, d_ff=16, n_encoder_layers=1, n_decoder_layers=1, positions=NoPE()
    )
    return EncoderDecoder(config).double().eval()


def _ids(t: Experiment, *shape: int) -> Tensor:
    return torch.randint(1, 11, shape, generator=t.generator)


@claim(
    EXERCISES,
    "2(b)(i)",
    statement="An encoder for classification needs the key padding mask in its self-attention, and no other.",
    method="A text alone, and padded on the right with two kinds of padding, with and without the mask.",
)
def encoder_masks(t: Experiment) -> None:
    model = ENCODER.replace(positions=NoPE()).build().double().eval()
    ids = _ids(t, 1, 5)
    alone = model(ids)
    long = torch.cat([ids, _ids(t, 1, 3)], 1)
    masked = model(long, mask=padding(torch.tensor([5])))
    t.assert_below("with the padding mask", max_abs_diff(masked[:, :5], alone), 1e-12, "changes by {:.1e}")
    t.assert_above("without it padding is felt", max_abs_diff(model(long)[:, :5], alone), 1e-6, "changes by {:.1e}")


@claim(
    EXERCISES,
    "2(b)(ii)",
    statement="A decoder needs the causal mask only; with padding on the right a key padding mask is not needed.",
    method="A text alone and padded on the right, through a two-layer decoder; then padded on the left.",
)
def decoder_masks(t: Experiment) -> None:
    model = DECODER.replace(positions=NoPE()).build().double().eval()
    ids, pad = _ids(t, 1, 5), _ids(t, 1, 3)
    alone = model(ids)
    right = model(torch.cat([ids, pad], 1))[:, :5]
    left_padded = model(torch.cat([pad, ids], 1))[:, 3:]
    t.assert_below("padding on the right", max_abs_diff(right, alone), 1e-12, "changes by {:.1e}")
    t.note(f"padding on the left would be felt: changes by {max_abs_diff(left_padded, alone):.1e}")


@claim(
    EXERCISES,
    "2(b)(iii)",
    statement=(
        "For translation the key padding mask goes into the encoder's self-attention and into "
        "cross-attention; the decoder needs only its causal mask if padding is on the right."
    ),
    method="A small encoder-decoder: each of the two padding masks left out in turn; target padded on the right.",
)
def encoder_decoder_masks(t: Experiment) -> None:
    net = _encoder_decoder()
    source, target = _ids(t, 1, 4), _ids(t, 1, 5)
    padded = torch.cat([source, _ids(t, 1, 3)], 1)
    mask = padding(torch.tensor([4]))
    alone = net(source, target)
    both, self_only, cross_only = (
        max_abs_diff(net.decode(target, net.encode(padded, mask=in_encoder), memory_mask=in_cross), alone)
        for in_encoder, in_cross in ((mask, mask), (mask, None), (None, mask))
    )
    t.assert_below("both masks", both, 1e-12, "changes by {:.1e}")
    t.assert_above("none in cross-attention: padding is felt", self_only, 1e-8)
    t.assert_above("none in the encoder: padding is felt", cross_only, 1e-8)
    longer = net(source, torch.cat([target, _ids(t, 1, 2)], 1))[:, :5]
    t.assert_below("target padded on the right, causal only", max_abs_diff(longer, alone), 1e-12)


@claim(
    HOMEWORK,
    "1.4b.6",
    statement="In the decoder self-attention also serves to attend to the encoder's representations.",
    method="The source of a small encoder-decoder is replaced: which attention of the decoder changes?",
)
def self_attention_reads_encoder(t: Experiment) -> None:
    net = _encoder_decoder()
    inputs: dict[str, list[Tensor]] = {"attention": [], "cross_attention": []}
    for part, outs in inputs.items():
        module = net.get_submodule(f"decoder.blocks.0.{part}")
        module.register_forward_hook(lambda _, __, out, outs=outs: outs.append(out))
    target = _ids(t, 1, 5)
    for source in (_ids(t, 1, 4), _ids(t, 1, 4)):
        net(source, target)
    self_change, cross = (max_abs_diff(*outs) for outs in inputs.values())
    t.assert_above("self-attention: output changes by", self_change, 0)
    correct = "That is cross-attention, with queries of the decoder and keys and values of the encoder; "
    t.correction(f"{correct}self-attention reads the decoder's own sequence.", self_change == 0 < cross)


@claim(
    HOMEWORK,
    "1.3e, result",
    statement=(
        "With causal masking the input can be processed as a stream: earlier outputs need not be revised when "
        "more arrives."
    ),
    method="A decoder of two layers on 9 tokens and on each of their prefixes; then an encoder, which has no mask.",
)
def causal_streams(t: Experiment) -> None:
    ids = torch.randint(11, (1, 9), generator=t.generator)
    for config, masked in ((DECODER, True), (ENCODER, False)):
        model = config.replace(max_len=16).build().double().eval()
        with torch.no_grad():
            full_logits = model(ids)
            moved = max(max_abs_diff(model(ids[:, :n]), full_logits[:, :n]) for n in range(1, 9))
        case_name = "masked" if masked else "not masked, every earlier output is revised"
        t.record_case(f"{case_name}: largest change", f"{moved:.1e}", (moved < 1e-12) == masked)


@claim(
    HOMEWORK,
    "1.3e",
    statement="Attention without a mask does not suit speech in real time; causal attention does.",
    method=(
        "Results from results/study-speech.json, which is part of the package: one small encoder under four "
        "masks on streams of spoken digits, three seeds, trained on a GPU; `python -m benchmarks study "
        "speech` reproduces it."
    ),
)
def causal_speech(t: Experiment) -> None:
    text = (resources.files("clearhead.course.claims") / "results" / "study-speech.json").read_text(encoding="utf-8")
    rows = [row for row in json.loads(text)["rows"] if row["facet"] == "known speakers"]
    for context in dict.fromkeys(row["series"] for row in rows):
        results = [row["values"] for row in rows if row["series"] == context]
        latencies = [latency for values in results if (latency := values["latency in s (95 %)"]) is not None]
        if context == "unlimited":
            early = "some" if latencies else "none"
            t.record_case("no mask: digits recognized before the end of a recording", early, not latencies)
        else:
            case_name = f"context {context}: seconds until 95 % of the digits are recognized"
            t.record_case(case_name, f"{max(latencies):.2f}", max(latencies) <= 0.5)
        rates = [values["error rate, streams"] for values in results]
        t.note(f"context {context}: {min(rates):.1%} to {max(rates):.1%} of the digits wrong")
