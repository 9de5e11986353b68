"""`make demo`: the shortest tour. A mask, drawn and counted; a small encoder-decoder, run once."""

from __future__ import annotations

from clearhead.cli.app import app
from clearhead.cli.output import console, show_picture, table


@app.command(hidden=True)
def demo() -> None:
    """Draw and count a mask, then run a small encoder-decoder once."""
    import torch

    from clearhead import masks
    from clearhead.models import EncoderDecoder, tiny_encoder_decoder

    pattern = masks.parse("window(2, 2) | every(4)")
    console.print(
        "[bold]A mask is an expression.[/bold] Rows are queries, columns are keys; a filled cell may attend.\n"
    )
    show_picture(str(pattern.draw(16)))
    density = pattern.density(16)
    console.print(
        f"\n{pattern}: {pattern.count(16)} of 256 pairs, density {density:.3f}, saving {1 - density:.1%}\n"
    )

    torch.manual_seed(0)
    model = EncoderDecoder(tiny_encoder_decoder()).eval()
    V = model.config.vocab_size
    lengths = torch.tensor([7, 4])
    source, target = torch.randint(V, (2, 7)), torch.randint(V, (2, 5))
    with torch.no_grad():
        logits = model(source, target, source_mask=masks.padding(lengths))
        source[1, 4:] = 0  # what stands in the padding
        unchanged = torch.equal(model(source, target, source_mask=masks.padding(lengths)), logits)
        target[:, -1] = 1  # what comes last
        past = torch.equal(model(source, target, source_mask=masks.padding(lengths))[:, :-1], logits[:, :-1])
    console.print(
        "[bold]A small encoder-decoder[/bold], untrained: padding in the source and the future are hidden.\n"
    )
    rows = [
        ("source, (batch, length)", tuple(source.shape)),
        ("target", tuple(target.shape)),
        ("logits, (batch, length, vocabulary)", tuple(logits.shape)),
        ("parameters", f"{sum(p.numel() for p in model.parameters()):,}"),
        ("other padding, same logits", "yes" if unchanged else "NO"),
        ("other last token, same logits before it", "yes" if past else "NO"),
    ]
    console.print(table(("", ""), rows))
