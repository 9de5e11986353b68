"""Public names exist, are documented, and are few."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys

import pytest

import clearhead
from clearhead.models import tiny_decoder

PACKAGES = (
    "masks",
    "attention",
    "attention.biases",
    "nn",
    "nn.positions",
    "models",
    "data",
    "training",
    "generation",
    "hub",
    "analysis",
    "analysis.cost",
    "analysis.checks",
    "course.exercises",
    "course.claims",
)


def test_all_contains_the_public_names():
    names = """ClearheadError Decoder Encoder EncoderDecoder KVCache MeanAblation MultiHeadAttention
    PatchActivation ReplaceActivation VisionTransformer ZeroAblation __version__
    analysis apply_mask attend attention check clear_caches cost course generate hub load masks nn
    pipeline save trace train"""
    assert set(clearhead.__all__) == set(names.split())


def test_dir_returns_only_public_names():
    code = "import clearhead, clearhead.analysis.cost, clearhead.analysis.checks; print(*dir(clearhead))"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert names == sorted(clearhead.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_exists_and_is_documented(package):
    module = importlib.import_module(f"clearhead.{package}")
    assert module.__doc__
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{package}.{name} has no docstring"


def test_errors_are_subclasses_of_builtin_errors():
    from clearhead import errors

    kinds = [e for e in vars(errors).values() if inspect.isclass(e) and e is not errors.ClearheadError]
    assert len(kinds) > 8
    for kind in kinds:
        assert issubclass(kind, errors.ClearheadError)
        assert any(
            base.__module__ == "builtins" for base in kind.__mro__[1:] if base not in (Exception, BaseException, object)
        )


def test_check_and_cost_are_functions_after_importing_their_packages():
    import clearhead.analysis.checks
    import clearhead.analysis.cost.layer_comparison

    assert inspect.isfunction(clearhead.cost)
    assert inspect.isfunction(clearhead.check)
    assert clearhead.cost("tiny-decoder", tokens=7).parameters.value > 0
    assert clearhead.check(clearhead.Decoder(tiny_decoder()), only=["determinism"]).ok


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_of_exported_functions_describe_arguments_and_results(package):
    module = importlib.import_module(f"clearhead.{package}")
    functions = {name: value for name in module.__all__ if inspect.isfunction(value := getattr(module, name))}
    for name, function in functions.items():
        docstring = inspect.getdoc(function) or ""
        has_arguments = bool(inspect.signature(function).parameters)
        returns_nothing = function.__annotations__.get("return") in (None, "None", "Iterator[None]")
        assert "Args:" in docstring or not has_arguments, f"{package}.{name} does not describe its arguments"
        describes_result = re.search(r"^(Return|Yield|Iterate)|^(Returns|Yields):", docstring, re.MULTILINE)
        assert describes_result or returns_nothing, f"{package}.{name} does not describe its result"
