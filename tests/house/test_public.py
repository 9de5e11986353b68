"""The public names: few, all there, all documented."""

from __future__ import annotations

import importlib
import inspect

import pytest

import clearhead
from clearhead.models import tiny_decoder

ROOMS = (
    "masks",
    "positions",
    "attention",
    "layers",
    "models",
    "data",
    "training",
    "generation",
    "look",
    "work",
    "cost",
    "check",
    "claims",
    "pretrained",
)


def test_the_face_is_what_the_design_says():
    assert set(clearhead.__all__) == {
        "ClearheadError",
        "Decoder",
        "Encoder",
        "EncoderDecoder",
        "KVCache",
        "MultiHeadAttention",
        "VisionTransformer",
        "__version__",
        "attend",
        "check",
        "cost",
        "generate",
        "load",
        "masks",
        "positions",
        "save",
        "train",
    }


@pytest.mark.parametrize("room", ROOMS)
def test_every_exported_name_exists_and_is_documented(room):
    module = importlib.import_module(f"clearhead.{room}")
    assert module.__doc__
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{room}.{name} has no docstring"


def test_errors_are_also_the_built_in_ones():
    from clearhead import errors

    kinds = [e for e in vars(errors).values() if inspect.isclass(e) and e is not errors.ClearheadError]
    assert len(kinds) > 8
    for kind in kinds:
        assert issubclass(kind, errors.ClearheadError)
        assert any(
            base.__module__ == "builtins"
            for base in kind.__mro__[1:]
            if base not in (Exception, BaseException, object)
        )


def test_a_room_that_is_also_a_function():
    import clearhead.cost.compare  # binds the module in the package, as any import of it does

    called, by_name = clearhead.cost("tiny-decoder", tokens=7), clearhead.cost.cost("tiny-decoder", tokens=7)
    assert called.parameters.value == by_name.parameters.value > 0
    assert callable(clearhead.cost.compare)
    assert clearhead.check(clearhead.Decoder(tiny_decoder()), only=["determinism"]).ok
