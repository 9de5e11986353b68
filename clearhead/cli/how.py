"""The options by which generation is steered, the same for every command that generates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.errors import ConfigError

if TYPE_CHECKING:
    from clearhead.generation import Greedy, How, Sample

BeamWidth = Annotated[
    int | None,
    typer.Option("--beam", help="Beam search of this width; 1 is greedy. By default 5, to evaluate 1."),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(help="In beam search: scores are divided by length to this power, by default the translator's own."),
]
Temperature = Annotated[float | None, typer.Option(help="Sample at this temperature instead of greedily.")]
TopK = Annotated[int | None, typer.Option(help="Sample among the k likeliest.")]
TopP = Annotated[float | None, typer.Option(help="Sample among the likeliest that hold this probability.")]
MinP = Annotated[
    float | None, typer.Option(help="Sample among those at least this many times as likely as the likeliest.")
]
Seed = Annotated[int, typer.Option(help="The seed of sampling.")]


def sampling(
    temperature: float | None, top_k: int | None, top_p: float | None, min_p: float | None, seed: int
) -> Greedy | Sample:
    """Greedy, unless any option asks for chance."""
    from clearhead.generation import Greedy, Sample

    if temperature is None and top_k is None and top_p is None and min_p is None:
        return Greedy()
    return Sample(
        temperature=1.0 if temperature is None else temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )


def searching(beam: int | None, length_penalty: float | None, default: How) -> How:
    """Beam search of a width, greedy for width 1; where none is given, of the default's width."""
    from clearhead.generation import Beam, Greedy
    from clearhead.pretrained.translate import LENGTH_PENALTY

    if beam is None:
        beam = default.width if isinstance(default, Beam) else 1
    if beam < 1:
        raise ConfigError(f"--beam is {beam}; a beam is at least 1 wide (1 is greedy)")
    return (
        Greedy()
        if beam == 1
        else Beam(beam, length_penalty=LENGTH_PENALTY if length_penalty is None else length_penalty)
    )
