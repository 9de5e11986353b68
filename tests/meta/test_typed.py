"""Strict mypy accepts the README's Python and a user's file, and infers the types of results."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import clearhead as ch
from clearhead import hub
from tests.support.readme import fenced

ROOT = Path(__file__).parents[2]

USER = """
from pathlib import Path

import torch
from torch import nn

import clearhead as ch
from clearhead import analysis, hub, masks
from clearhead.analysis.checks import CheckReport, Ids, ModuleSpec
from clearhead.models import tiny_decoder


def report(model: nn.Module) -> CheckReport:
    return ch.check(ModuleSpec(model, inputs=Ids(50)), causal=True, only=["causality"])


def parameters() -> int:
    return int(ch.cost("tiny-decoder", tokens=7).parameters.value)


def shown(folder: Path) -> list[str]:
    trained = hub.pipeline(folder)
    album = analysis.attention_report(trained, "How are you?")
    return [made.target for made in hub.translations(trained, [album.title])]


model = ch.Decoder(tiny_decoder())
pipe = ch.pipeline("en-es")
attention = ch.MultiHeadAttention(12, 3)
x = torch.randn(1, 2, 3, 5)
ids = torch.zeros(1, 3, dtype=torch.long)
conversation: list[dict[str, str]] = [{"role": "user", "content": "Hello"}]
"""
# Expressions of a user, and their types.
TYPES = {
    "ch.check(model)": "clearhead.analysis.checks.check_report.CheckReport",
    "ch.cost(model, tokens=7)": "clearhead.analysis.cost.result.Cost",
    "ch.attend(x, x, x, masks.causal())": "torch._tensor.Tensor",
    "ch.load('shakespeare')": "clearhead.models.decoder.Decoder",
    "ch.load('en-es')": "clearhead.models.encoder_decoder.EncoderDecoder",
    "ch.load(Path('runs/book'))": "torch.nn.modules.module.Module",
    "model(ids)": "torch._tensor.Tensor",
    "model.config.d_model": "int",
    "attention(x)": "torch._tensor.Tensor",
    "ch.generate(model, ids)": "clearhead.generation.results.Generated",
    "ch.generate(pipe, 'a')": "str",
    "ch.generate(pipe, ['a'])": "list[str]",
    "pipe.config": "clearhead.config.Config",
    "pipe.tokenizer": "clearhead.data.tokenizers.base.Tokenizer",
    "pipe.card": "TypedDict(clearhead.hub.bundled.Card",
    "pipe.generate('a')": "str",
    "pipe.generate(['a'])": "list[str]",
    "pipe.stream('a')": "typing.Iterator[str]",
    "pipe.chat(conversation)": "str",
    "pipe.chat([conversation])": "list[str]",
    "pipe.translate('a')": "str",
    "pipe.translate(['a'])": "list[str]",
    "pipe.summarize('a')": "str",
    "pipe.summarize(['a'])": "list[str]",
    "pipe.embed('a')": "torch._tensor.Tensor",
    "pipe.classify('a')": "dict[str, float]",
    "pipe.classify(['a'])": "list[dict[str, float]]",
    "pipe.fill_mask('a')": "list[list[clearhead.hub.encoder_tasks.TokenCandidate]]",
    "pipe.tag('a')": "list[clearhead.hub.encoder_tasks.TaggedSpan]",
    "pipe.tag(['a'])": "list[list[clearhead.hub.encoder_tasks.TaggedSpan]]",
    "pipe.answer('a', 'b')": "clearhead.hub.encoder_tasks.Answer",
    "pipe.answer(['a'], ['b'])": "list[clearhead.hub.encoder_tasks.Answer]",
    "pipe.choose('a', ['b'])": "dict[str, float]",
    "pipe.transcribe('a.wav')": "clearhead.hub.speech.Transcript",
    "pipe.transcribe(['a.wav'])": "list[clearhead.hub.speech.Transcript]",
    "analysis.run_with_cache(pipe, 'a')": "tuple[torch._tensor.Tensor, clearhead.analysis.tracing.trace.Trace]",
    "analysis.run_with_cache(model, ids)": "tuple[torch._tensor.Tensor, clearhead.analysis.tracing.trace.Trace]",
    "ch.trace(pipe)['blocks.0.output']": "torch._tensor.Tensor",
    "analysis.logit_lens(pipe, 'a').top()": "tuple[torch._tensor.Tensor, torch._tensor.Tensor]",
    "analysis.attribute(pipe, 'a')": "clearhead.analysis.interp.attribution.Attribution",
    "masks.causal() & masks.window(3, 0)": "clearhead.masks.base.Mask",
    "masks.causal().dense(3, 3)": "torch._tensor.Tensor",
    "masks.causal().count(3, 3)": "int",
}
USER += "".join(f"reveal_type({expression})\n" for expression in TYPES)
USER += 'ch.check(model, seed="0")  # an error: mypy sees the signatures, and not Any\n'


def test_strict_mypy_accepts_a_typed_user_package(tmp_path):
    assert (Path(ch.__file__).parent / "py.typed").is_file()
    package = tmp_path / "typed_user"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "own.py").write_text(USER)
    for number, code in enumerate(fenced("python")):
        (package / f"readme_{number}.py").write_text(code)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--python-version=3.11"]
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / "typed_user"), str(package)]
    process = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"MYPYPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    errors = [line for line in process.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1, process.stdout + process.stderr
    assert re.search(r'own\.py:\d+: error: Argument "seed" to "check" has incompatible type', errors[0])
    types = re.findall(r'Revealed type is "(.*)"', process.stdout)
    assert len(types) == len(TYPES)
    for expression, expected, actual in zip(TYPES, TYPES.values(), types, strict=True):
        assert "Any" not in actual, expression
        assert actual.replace("'", "").startswith(expected), expression  # mypy quotes names that it has not cached


@pytest.mark.parametrize("name", hub.names())
def test_load_is_annotated_with_the_class_of_each_bundled_model(name):
    types = {}
    load = inspect.unwrap(ch.load)
    for overload in typing.get_overloads(load):
        hints = typing.get_type_hints(overload, load.__globals__)
        types |= dict.fromkeys(typing.get_args(hints["name"]), hints["return"])
    assert type(ch.load(name)) is types[name]
