"""Predict the cost of a module, configuration, preset or attention layer by executing it on fake tensors.

Fake tensors have sizes and no data, so nothing is computed and no memory is needed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode, unset_fake_temporarily
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from clearhead._core.keywords import explain_keywords
from clearhead._core.validation import check_int, lookup, validate
from clearhead.analysis.cost.formulas import FormulaSolver, SymbolicProbe, layer_lists, prime_sizes, size_symbols
from clearhead.analysis.cost.op_recorder import ExecutionLog, record_execution
from clearhead.analysis.cost.result import Cost
from clearhead.analysis.inputs.example import Example, Tokens, example
from clearhead.errors import ConfigError, DtypeError, ImplementationError, ShapeError
from clearhead.masks import Mask, as_mask
from clearhead.models import PRESETS, Config
from clearhead.nn import MultiHeadAttention

_IMPLEMENTATIONS = ("auto", "sdpa", "sparse", "reference")


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of one multi-head attention layer, with the arguments of `MultiHeadAttention`.

    Args:
        d_model: Width of the inputs and outputs.
        n_heads: Number of query heads.
        n_kv_heads: Number of key and value heads; `n_heads` by default.
        d_head: Width of a head; d_model / n_heads by default.
        bias: Whether the projections have biases.

    Raises:
        ConfigError: The sizes do not fit together.

    Example:
        >>> cost(AttentionSizes(512, 8), tokens=1000).forward.value
        4145152000
    """

    d_model: int
    n_heads: int
    _: KW_ONLY
    n_kv_heads: int | None = None
    d_head: int | None = None
    bias: bool = True

    def __post_init__(self) -> None:
        with torch.device("meta"):  # validates the sizes without allocating memory
            self.build()

    def build(self) -> MultiHeadAttention:
        """Return a layer of these sizes."""
        return MultiHeadAttention(**vars(self))


@dataclass(frozen=True)
class ModelBuilder:
    """How the module to be priced is built, and the configuration it is built from, if it has one."""

    label: str
    build: Callable[[], nn.Module]
    config: Config | AttentionSizes | None = None
    inputs: object = None  # a description from `clearhead.analysis.checks`, or tensors
    is_fresh: bool = True  # False: `build` returns an existing module, which must not be changed
    mode: FakeTensorMode | None = None  # of the tensors of a copied module


def preset(name: str) -> Config:
    """Return the configuration of a preset.

    Args:
        name: Name of the preset, such as "gpt2".

    Raises:
        ConfigError: The name is unknown; the message suggests the nearest one.
    """
    return lookup(name, PRESETS, "unknown preset")()


def model_builder(subject: object, inputs: object = None) -> ModelBuilder:
    """Return the builder of a configuration, a module, or the name of a preset."""
    if isinstance(subject, ModelBuilder):
        return subject
    if isinstance(subject, str):
        return model_builder(preset(subject), inputs)
    if isinstance(subject, (Config, AttentionSizes)):
        label = type(subject).__name__.removesuffix("Config").replace("AttentionSizes", "MultiHeadAttention")
        return ModelBuilder(label, subject.build, subject, inputs)
    if isinstance(subject, nn.Module):
        _check_module(subject)
        config = getattr(subject, "config", None)
        config = config if isinstance(config, Config) else None
        return ModelBuilder(type(subject).__name__, lambda: subject, config, inputs, is_fresh=False)
    raise ConfigError(f"got a {type(subject).__name__}; expected a configuration, a module, or the name of a preset")


def _check_module(module: nn.Module) -> None:
    """Raise ConfigError if the module cannot be copied to fake tensors."""
    name = type(module).__name__
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise ConfigError(f"{name} is TorchScript, which needs tensors with data; pass the module it was made from")
    if lazy := next((name for name, p in module.named_parameters() if is_lazy(p)), ""):
        raise ConfigError(f"the size of {lazy} in {name} is unknown until its first call; call the module once before")


def build_module(build: Callable[[], Any], device: str = "meta") -> Any:
    """Call `build` on `device`, or on the default device if the constructor reads the values of its parameters."""
    try:
        with torch.device(device):
            return build()
    except RuntimeError:
        return build()


def to_fake(builder: ModelBuilder, mode: FakeTensorMode, dtype: torch.dtype, impl: str) -> nn.Module:
    """Build the module with fake tensors of this dtype; an existing module is copied."""
    if builder.is_fresh:
        with unset_fake_temporarily():
            module = build_module(builder.build)
    else:
        module = _fake_copy(builder, mode)
    replacements: dict[int, tuple[Tensor, Tensor]] = {}

    def empty(x: Tensor) -> Tensor:
        new = torch.empty_strided(x.shape, x.stride(), dtype=dtype if x.is_floating_point() else x.dtype)
        new = nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new
        return replacements.setdefault(id(x), (x, new))[1]  # shared tensors remain shared

    for submodule in module.modules():
        tensor_dicts: tuple[dict[str, object], ...] = (submodule._parameters, submodule._buffers, vars(submodule))
        for tensors in tensor_dicts:
            tensors.update({name: empty(x) for name, x in tensors.items() if isinstance(x, Tensor)})
    return set_impl(module, impl)


def _detached(builder: ModelBuilder) -> ModelBuilder:
    """Replace an existing module by a copy without data, so that a `Cost` does not keep the module alive."""
    if builder.is_fresh:
        return builder
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    skeleton = _fake_copy(builder, mode)
    return replace(builder, build=lambda: skeleton, mode=mode)


def _fake_copy(builder: ModelBuilder, mode: FakeTensorMode) -> nn.Module:
    try:
        with FakeCopyMode(mode):
            return copy.deepcopy(builder.build())
    except TypeError as error:
        raise ConfigError(f"{builder.label} cannot be copied ({error}); give a factory, package.module:name") from error


def set_impl(model: nn.Module, impl: str) -> nn.Module:
    """Set the implementation of every attention layer and return the model; "auto" changes nothing."""
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and impl != "auto":
            module.impl = impl  # type: ignore[assignment]
    return model


# ---------------------------------------------------------------------- prediction


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Settings of the runs on tensors without data; see `cost`."""

    dtype: torch.dtype
    training: bool
    mask: Mask | None
    impl: str
    device: str
    activation_checkpointing: bool

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise DtypeError(
                f"dtype is {self.dtype}; expected a floating-point dtype such as torch.float32 or torch.bfloat16"
            )
        if self.impl not in _IMPLEMENTATIONS:
            names = ", ".join(f'"{name}"' for name in _IMPLEMENTATIONS)
            raise ImplementationError(f'impl="{self.impl}" is unknown; choose one of {names}')
        for name in ("training", "activation_checkpointing"):
            validate(getattr(self, name), name, bool)

    def run(
        self, builder: ModelBuilder, tokens: Tokens, batch: int, *, reference: ExecutionLog | None = None
    ) -> tuple[ExecutionLog, Example, nn.Module]:
        """Run a module on fake tensors; return the log, the example input and the module."""
        with builder.mode or FakeTensorMode(allow_non_fake_inputs=True) as mode:
            module = to_fake(builder, mode, self.dtype, self.impl).train(self.training)
            inputs = example(
                module,
                builder.label,
                tokens=tokens,
                batch=batch,
                dtype=self.dtype,
                mask=self.mask,
                inputs=tree_map_only(Tensor, _on_cpu, builder.inputs),
            )
            trained = [*module.parameters(), *inputs.tensors]
            if self.training and not any(x.requires_grad for x in trained):
                raise ConfigError(f"{builder.label} has no parameter that requires gradients; omit training")
            log = record_execution(
                module,
                inputs.loss if self.training else inputs.run,
                inputs.tensors,
                training=self.training,
                device=self.device,
                recompute=self.activation_checkpointing,
                reference=reference,
            )
        return log, inputs, module


@explain_keywords
def cost(
    subject: Config | nn.Module | AttentionSizes | ModelBuilder | str,
    *,
    tokens: Tokens = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    training: bool = False,
    mask: Mask | None = None,
    impl: str = "auto",
    device: torch.device | str = "cuda",
    activation_checkpointing: bool = False,
    inputs: object = None,
) -> Cost:
    """Predict parameters, FLOPs, bytes accessed, memory and kernels of a module, with formulas.

    The real module runs forward (in training also backward) on fake tensors, which have sizes and no data: nothing is
    computed, and no memory is needed.

    Args:
        subject: A module, a configuration, the name of a preset, the sizes of an attention layer, or a `ModelBuilder`.
        tokens: Sequence length, or (source, target) for an encoder-decoder. Models of images need none.
        batch: Sequences per step.
        dtype: Dtype of parameters, activations, gradients and optimizer state.
        training: Predict one training step (forward with dropout, backward, AdamW) instead of a forward pass.
        mask: Combined with the model's own mask. Attention is charged for the pairs that `impl` computes.
        impl: Attention implementation.
        device: "cuda" or "cpu": whose kernels run.
        activation_checkpointing: Save only the input of each block and run the block again in backward.
        inputs: How a module without a known interface is called: `Ids(vocab_size)`, `Embeddings(width)` or
            `Values(shape)` of `clearhead.analysis.checks`, or the input tensors.

    Returns:
        The prediction; it can be pickled and does not keep the module alive.

    Raises:
        ConfigError: An argument is invalid, or the module cannot run on tensors without data.
        ShapeError: The length does not fit the model.
        DtypeError: `dtype` is not a floating-point dtype.
        ImplementationError: `impl` is unknown.

    Example:
        >>> c = ch.cost("gpt2", tokens=1024, batch=8, training=True)
        >>> c.parameters.value
        124439808
    """
    check_int(batch, "batch", minimum=1)
    dry_run = DryRun(
        dtype=dtype,
        training=training,
        mask=None if mask is None else as_mask(mask),
        impl=impl,
        device=_device_type(device),
        activation_checkpointing=activation_checkpointing,
    )
    builder = _detached(model_builder(subject, inputs))
    return _predict(subject if isinstance(subject, str) else builder.label, builder, dry_run, tokens, batch)


def _predict(name: str, builder: ModelBuilder, dry_run: DryRun, tokens: Tokens, batch: int) -> Cost:
    log, sample, module = dry_run.run(builder, tokens, batch)
    length = _checked_length(builder.label, sample, tokens, log)
    lists = layer_lists(module)
    max_len = sample.spec.max_len
    has_source = sample.spec.source is not None
    sizes = size_symbols(builder.config, length, batch, has_source) | dict(lists.values()) | _pair_symbols(log)

    def execute_probe() -> SymbolicProbe:
        config, probe_length, probe_batch, expressions = prime_sizes(builder.config, length, max_len)
        probed = builder
        if config is not None:
            probed = replace(builder, build=config.build, config=config, is_fresh=True, mode=None)
        probe_log = dry_run.run(probed, probe_length, probe_batch, reference=log)[0]
        return SymbolicProbe(probe_log, expressions, sizes, lists)

    return Cost(
        name=name,
        batch=batch,
        dtype=dry_run.dtype,
        training=dry_run.training,
        impl=dry_run.impl,
        device=dry_run.device,
        activation_checkpointing=dry_run.activation_checkpointing,
        sizes=sizes,
        log=log,
        solver=FormulaSolver(log, execute_probe),
        has_kv_cache=sample.spec.caching is not None or isinstance(module, MultiHeadAttention),
        has_source=has_source,
        max_len=max_len,
    )


def _device_type(device: torch.device | str) -> str:
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        kind = ""
    if kind not in ("cuda", "cpu"):
        raise ConfigError(f"device is {str(device)!r}; expected 'cuda' or 'cpu', whose kernels are counted")
    return kind


def _on_cpu(x: Tensor) -> Tensor:
    """Return a tensor of this size on the device of the fake module."""
    return x if x.device.type == "cpu" else torch.empty_like(x, device="cpu", requires_grad=x.requires_grad)


def _pair_symbols(log: ExecutionLog) -> dict[str, int]:
    """Return symbols for pair counts that are not a formula of the sizes."""
    record = next((record for record in log.attention if record.allowed is not None), None)
    if record is None:
        return {}
    counts = {"P": record.allowed, "P_g": record.computed}
    return {symbol: n // record.mask_repeats for symbol, n in counts.items() if n is not None}


def _checked_length(label: str, sample: Example, tokens: Tokens, log: ExecutionLog) -> Tokens:
    """Return `tokens`, which must be absent or correct for models with a fixed input size."""
    if sample.spec.is_sequence or tokens is None:
        return tokens
    expected = log.attention[0].queries if log.attention else None
    if tokens == expected:
        return None
    if expected is None:
        raise ShapeError(f"{label} does not take a sequence; omit tokens")
    raise ShapeError(
        f"{label} has {expected} tokens per image, got tokens={tokens}; change image_size in its configuration instead"
    )
