"""The views of `clearhead look` that ask further: lens, attribution, patching, ablation, induction, vectors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead import look, pretrained
from clearhead.checks import spec_for
from clearhead.checks.subject import CallInputs, Ids
from clearhead.cli.named import inputs_of, named
from clearhead.cli.output import colour, console, say, show_json, show_picture, tell
from clearhead.errors import ConfigError
from clearhead.look import AttentionReport, LogitMetric, ModelInputs, figures
from clearhead.look.question import run_logits

Found = tuple[str, dict[str, Any], list[Any]]
"""A title, a document for programs, and charts."""


@dataclass(frozen=True)
class Asked:
    """A model and its input; `ask` makes a question of another input, `album` shows what attended to what."""

    model: nn.Module
    given: str | None
    ask: Callable[[str | None], ModelInputs]
    album: Callable[[], AttentionReport]
    name: Callable[[int], str] = str
    choices: int = 0  # how many tokens have a name


def trained_asked(name: str, given: str | None, place: Mapping[str, Any], how: Mapping[str, Any]) -> Asked:
    """A model by its name, which has a tokenizer or reads pictures."""
    trained = pretrained.load(name, **place)

    def needed(text: str | None) -> str:
        if text is None:
            raise ConfigError(f"give {name} an input to look at: a text, or the file of a picture")
        return text

    words: dict[str, Any] = {}
    if trained.task not in ("digits", "speech"):
        tokenizer = trained.tokenizer
        words = {"name": lambda token: tokenizer.tokens([token])[0], "choices": tokenizer.vocab_size}
    return Asked(
        trained.model,
        given,
        lambda text: look.model_inputs(trained, needed(text), **how),
        lambda: look.attention_report(trained, needed(given), **how),
        **words,
    )


def module_asked(
    name: str, given: str | None, inputs: tuple[Any, ...], place: Mapping[str, Any], *, seed: int, length: int
) -> Asked:
    """What a factory makes, called as `check` calls it; its input is drawn where no token numbers are given."""
    spec = spec_for(named(name), **inputs_of(*inputs))
    model, reads = spec.module, spec.inputs
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{name} gives a {type(model).__name__}; only a PyTorch module can be looked into")
    model = model.to(**place).eval()

    def ask(text: str | None) -> ModelInputs:
        generator = torch.Generator().manual_seed(seed)
        drawn: list[Any] = [one and one.draw(1, length, generator) for one in (spec.source, reads)]
        if text is not None:
            if not isinstance(reads, Ids):
                raise ConfigError(f"{name} does not read token numbers; leave INPUT out, and one is drawn from --seed")
            drawn[1] = torch.tensor([numbers(text, reads.vocab_size)])
        moved: list[Any] = [y if y is None else y.to(place["device"]) for y in drawn]
        source, x = (y.to(place["dtype"]) if y is not None and y.is_floating_point() else y for y in moved)
        call: dict[str, Any] = {}

        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            call.update(inspect.signature(module.forward).bind(*args, **kwargs).arguments)

        handle = model.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            with torch.no_grad():
                spec.run(model, CallInputs(x=x, source=source))
        finally:
            handle.remove()
        tokens = x[0].tolist() if isinstance(reads, Ids) else range(x.shape[1] if spec.is_sequence else 0)
        return look.ModelInputs(call, tuple(map(str, tokens)), str, spec.name)

    def album() -> AttentionReport:
        question = ask(given)
        with torch.no_grad(), look.trace(model, "**.weights") as t:
            model(**dict(question.args))
        one_text = spec.source is None and spec.is_sequence
        return look.build_report(t, question.tokens if one_text else None, title=question.title)

    return Asked(model, given, ask, album)


def numbers(text: str, most: int) -> list[int]:
    """Token numbers out of a text such as `3 1 4`."""
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and int(word) < most for word in words):
        raise ConfigError(f"got {text!r} for token numbers; expected some from 0 to {most - 1}, such as '3 1 4'")
    return [int(word) for word in words]


def into(asked: Asked, view: str, told: Mapping[str, Any], *, html: Path | None, out: Path | None, json: bool) -> None:
    """One of the views, in the terminal, as JSON, as a figure or as a page."""
    title, document, charts = _VIEWS[view](asked, told)
    if html is not None:
        look.save_page(charts, html, title=title)
    if out is not None:
        figures.save(figures.chart(charts[0]), out)
    if json:
        return show_json({"title": title, "view": view, **document})
    say(title)
    for path in filter(None, (html, out)):
        tell(f"written to {path}")
    for chart in charts if html is None and out is None else ():
        say(f"\n{chart.title}\n")
        show_picture(chart.text(width=console.width, color=colour()))
        if note := getattr(chart, "note", ""):
            console.print(f"\n{note}", markup=False, style="dim")


def _lens(asked: Asked, told: Mapping[str, Any]) -> Found:
    question = asked.ask(asked.given)
    found = look.logit_lens(asked.model, question.args, positions=told["row"])
    return question.title, found.to_dict(question.name), found.charts(question.tokens, question.name)


def _attribution(asked: Asked, told: Mapping[str, Any]) -> Found:
    question, answer, title = _question(asked, told)
    found = look.attribute(asked.model, question.args, answer)
    return title, found.to_dict(), found.charts()


def _patching(asked: Asked, told: Mapping[str, Any]) -> Found:
    """Patching from another input, or ablation where there is none."""
    question, answer, title = _question(asked, told)
    how: dict[str, Any] = {name: told[name] for name in ("granularity", "modules") if told[name] is not None}
    if told["patch"] is None:
        grid = look.ablate(asked.model, question.args, answer, **how)
    else:
        other: Any = asked.ask(told["patch"]).args
        if question.source:  # of a translation only what was read differs, not what is written
            other = (other[0], question.args[1])  # type: ignore[index]
        grid = look.patch(asked.model, question.args, other, answer, **how)
    is_source = bool(question.source) and grid.rows[0].startswith("encoder")
    return title, grid.to_dict(), grid.charts(question.source if is_source else question.tokens)


def _induction(asked: Asked, told: Mapping[str, Any]) -> Found:
    found = look.induction_scores(asked.model)
    return "Random tokens, said twice: where each head looks", found.to_dict(), found.charts()


def _vectors(asked: Asked, told: Mapping[str, Any]) -> Found:
    table = next((m for m in asked.model.modules() if isinstance(m, nn.Embedding)), None)
    if table is None:
        raise ConfigError("this model has no table of token embeddings to show")
    found = look.pca(table.weight, [asked.name(i) for i in range(table.num_embeddings)])
    return "Token embeddings in two dimensions", found.to_dict(), [found]


def _question(asked: Asked, told: Mapping[str, Any]) -> tuple[ModelInputs, LogitMetric, str]:
    """The input, what is asked about it, and that in words."""
    question = asked.ask(asked.given)
    logits: Tensor = run_logits(asked.model, question.args)
    token, versus = (_token(told[name], asked) for name in ("answer", "versus"))
    answer = LogitMetric(token, versus, -1 if told["row"] is None else told["row"]).resolve(logits)
    first, *second = (question.name(t).strip() or question.name(t) for t in (answer.token, versus) if t is not None)
    place = f" after {question.tokens[answer.position].strip()}" if logits.dim() > 2 else ""
    rather = f" rather than {second[0]}" if second else ""
    return question, answer, f"Why {first}{rather}{place}? {question.title}"


def _token(word: str | None, asked: Asked) -> int | None:
    if word is None:
        return None
    found = next((i for i in range(asked.choices) if word in (asked.name(i), asked.name(i).strip())), None)
    if found is None and not word.isdecimal():
        raise ConfigError(f"no token of this model is called {word!r}; give one as the views show it, or its number")
    return int(word) if found is None else found


_VIEWS: dict[str, Callable[[Asked, Mapping[str, Any]], Found]] = {
    "lens": _lens,
    "attribution": _attribution,
    "patching": _patching,
    "ablation": _patching,
    "induction": _induction,
    "vectors": _vectors,
}
