"""`make demo`: draw and count a mask, then translate sentences with a bundled model."""

from __future__ import annotations

from typing import Annotated, Any

import clearhead as ch
from clearhead.cli.app import app
from clearhead.cli.options import argument
from clearhead.cli.output import console, show_picture, table

SENTENCES = ("Hello world", "Where is the library?", "I have two cats and a dog.")


@app.command(hidden=True)
def demo(text: Annotated[list[str] | None, argument("Sentences to translate after Hello world.")] = None) -> None:
    """Draw and count a mask, then translate "Hello world" and more sentences and show their cross-attention."""
    from clearhead.cli.translate import cross_attention

    pattern = ch.masks.parse("window(2, 2) | every(4)")
    console.print("[bold]A mask is an expression.[/bold] Rows are queries, columns are keys; ■ may attend.\n")
    show_picture(str(pattern.draw(16)))
    density = pattern.density(16)
    console.print(
        f"\n{pattern}: {pattern.count(16)} of 256 pairs, density {density:.3f}, sparsity {100 * (1 - density):.1f} %\n",
        markup=False,
    )

    trained = ch.pipeline("en-es")
    sizes: Any = trained.model.config
    console.print(
        f"[bold]An encoder-decoder[/bold] of {sum(p.numel() for p in trained.model.parameters()):,} parameters, "
        f"{sizes.n_encoder_layers} + {sizes.n_decoder_layers} layers, trained by this project:\n"
    )
    texts = [SENTENCES[0], *text] if text else list(SENTENCES)
    translations = [translation for translation in ch.hub.translations(trained, texts) if translation.source_ids]
    console.print(table(("English", "Spanish"), [(entry.source, entry.target) for entry in translations]))
    for translation in translations:
        console.print("\n[bold]Cross-attention[/bold]: each target token (left) over ", end="")
        console.print(f"“{translation.source}”\n", markup=False)
        show_picture(cross_attention(trained, translation))
