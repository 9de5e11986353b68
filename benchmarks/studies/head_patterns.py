"""What the heads of the shipped models look at, by patterns that need no tagger: the token before, after or itself, the
same token elsewhere, punctuation, the first and the last place.

For each pattern the head that follows it most, beside the same model with weights that were never trained. A seed
draws the sentences that the translator reads, what the other model writes and reads, and the untrained weights."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

from benchmarks.studies.runner import Curve, Outcome, Sizes, Study
from clearhead.analysis.reports import attention_report, translation_report
from clearhead.analysis.views.attention_map import label_from_scores
from clearhead.analysis.views.report import AttentionReport
from clearhead.generation import Greedy, Sample
from clearhead.hub import Pipeline, pipeline
from clearhead.hub.text_generation import generate
from clearhead.hub.translate import translations

# Which model, and the path of its layers with a star for their number.
STACKS = {
    "en-es, encoder": ("en-es", "encoder.blocks.*.attention"),
    "en-es, decoder": ("en-es", "decoder.blocks.*.attention"),
    "en-es, decoder to encoder": ("en-es", "decoder.blocks.*.cross_attention"),
    "shakespeare": ("shakespeare", "blocks.*.attention"),
}
PATTERNS = ("previous token", "next token", "diagonal", "same token", "punctuation", "first token", "last token")
SENTENCES = """Where is my book? I can't find it. | He said that he was tired, but he kept working.
Do you want coffee, tea, or water? | My brother's wife works in a hospital. | If it rains, we will stay at home.
I don't know what you are talking about. | The train to Madrid leaves at nine, I think.
She bought a red car, a red hat and a red coat. | Why didn't you call me yesterday?
The more I read, the more I want to read. | Tom and Mary live in a small house near the sea.
Stop! You can't park your car here. | What he told us was not true. | The old man gave the old dog some bread.
Could you open the window, please? | I have never seen such a beautiful city.
He speaks English, and his sister speaks French. | When I was young, I used to play the piano.
It's late; let's go home. | That is the woman whose son won the prize. | We need milk, eggs, sugar and flour.
You must not forget to close the door. | How many languages does your teacher speak? | I think, therefore I am."""


def albums(sizes: Sizes, trained: Pipeline, reader: Pipeline, seed: int) -> list[AttentionReport]:
    """What `reader` looks at in texts that `trained` has made or translated: the same ids whoever reads them."""
    if trained.task == "translation":
        chosen = random.Random(seed).sample(re.split(r" \| |\n", SENTENCES), sizes.tested)
        return [translation_report(reader, made) for made in translations(trained, chosen, strategy=Greedy())]
    starts = ["ROMEO:\n", "KING HENRY:\n", "First Citizen:\n", "JULIET:\n"][: sizes.batch]
    how = Sample(temperature=0.8, seed=seed)
    made = generate(trained, starts, strategy=how, max_new_tokens=sizes.length)
    return [attention_report(reader, start + text) for start, text in zip(starts, made, strict=True)]


def measure(sizes: Sizes, stack: str, weights: str, seed: int) -> tuple[Curve, dict[str, Any]]:
    name, group = STACKS[stack]
    trained = pipeline(name)
    config: Any = trained.model.config
    reader = trained if weights == "trained" else replace(trained, model=config.build().eval())
    heads: dict[str, list[dict[str, float]]] = {}  # the scores of each head, one dict a text
    for album in albums(sizes, trained, reader, seed):
        for picture in album.stacks[group]:
            for number, label in enumerate(picture.summary.labels):
                heads.setdefault(f"{picture.path} head {number}", []).append(label.scores)
    means = {head: _means(scores) for head, scores in heads.items()}
    tried = next(iter(means.values()))
    best = {p: max(means, key=lambda head, p=p: means[head][p]) for p in PATTERNS if p in tried}  # type: ignore[misc]
    curve: Curve = {p: means[head][p] for p, head in best.items()}
    return curve, {"heads": best, "labels": {head: str(label_from_scores(scores)) for head, scores in means.items()}}


def _means(scores: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each pattern over the texts in which some token could follow it."""
    tried = {p: [one[p] for one in scores if p in one] for p in (*PATTERNS, "broad")}
    return {p: sum(found) / len(found) for p, found in tried.items() if found}


def finding(sizes: Sizes, found: Outcome) -> str:
    parts = []
    for stack in found.panels:
        share = {p: [found.mean(stack, line, p) or 0.0 for line in ("trained", "untrained")] for p in found.xs(stack)}
        most = sorted(share, key=lambda p: share[p][1] - share[p][0])[:3]
        told = [f"{p} {found.said(stack, 'trained', p)}, untrained {share[p][1]:.0%}" for p in most]
        parts.append(f"{stack}: {'; '.join(told)}")
    what = "The three patterns that training raised most, by the share of their best head's weight"
    return f"{what}. {'. '.join(parts)}."


STUDY = Study(
    name="gaze",
    asks="What do the heads of the shipped models look at?",
    says=(
        "CENG 403 (Self-Attention and Transformers), answered exam, Q2c: heads specialise on relations of their own",
        "CSCI-GA 2572, Transformer homework, Problem 1.4c: heads for nearby words, for syntax, for meaning",
        "CSCI-GA 2572, Transformer homework, Problem 1.4b: weights show what the model looks at",
    ),
    panel=("stack", tuple(STACKS)),
    line=("weights", ("trained", "untrained")),
    x="pattern",
    y="share of weight, best head",
    sizes=Sizes(tested=12, batch=4, length=120),  # sentences by seed; texts that go on, and for how long
    quick=Sizes(tested=1, batch=1, length=8),
    measure=measure,
    finding=finding,
    bars=True,
)
