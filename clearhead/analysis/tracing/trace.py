"""Record a forward pass without changing the model: `with ch.trace(model) as t: model(...)`.

The model stays on its fast path, which never materializes the attention weights. A trace stores references to the
inputs of each attention layer, and the requested inputs and outputs of modules; it copies and computes nothing while
the model runs. Weights are recomputed on demand by the reference implementation, only for the requested heads and
rows, and `difference` compares them with the recorded outputs. Reading a tensor that was modified in place since then
raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from clearhead._core.keywords import explain_keywords
from clearhead._core.shapes import Float
from clearhead._core.text_tables import PreformattedText
from clearhead._core.validation import check_int, require
from clearhead.analysis.tracing import recompute
from clearhead.analysis.tracing.activation_store import (
    KINDS,
    RecordedRun,
    RecordStore,
    concat_steps,
    resolve_patterns,
    split_by_step,
)
from clearhead.analysis.tracing.attention_recorder import AttentionRecorder
from clearhead.analysis.tracing.call_analysis import can_attend, is_attention_layer, modules_to_hook
from clearhead.analysis.tracing.edits import Intervention
from clearhead.analysis.tracing.recompute import AttentionCall, Indices, VersionedRef, resolve_indices, select_indices
from clearhead.analysis.tracing.trace_tables import error_table, no_attention_reason, run_html
from clearhead.attention.inputs import AttentionInputs
from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.hub import Pipeline


class Trace:
    """Recorded activations of the forward passes inside its `with` block, by module path.

    A *run* is one call of the model, or one generation with a cache, whose steps are concatenated. `run=-1` is the last
    run and 0 the first. After a beam search the rows are the beams that were active in the last step.

    Args:
        model: The module, or a pipeline.
        *patterns: Activations to record, such as "blocks.*.attention.weights" or "output".
        runs: Number of latest runs to keep; None for all.

    Raises:
        ConfigError: `runs` is less than 1, or a pattern matches no module.
        DtypeError: `model` is not a module.

    Example:
        with ch.trace(model, "blocks.*.attention.weights", "output") as t:
            model(ids)
        t.weights("blocks.0.attention", heads=2)
    """

    def __init__(self, model: nn.Module | Pipeline, *patterns: str, runs: int | None = None) -> None:
        if runs is not None:
            check_int(runs, "runs", minimum=1)
        model = model.model if isinstance(model, Pipeline) else model
        if not isinstance(model, nn.Module):
            raise DtypeError(f"cannot trace a {type(model).__name__}; expected a PyTorch module")
        self._modules = dict(model.named_modules())
        self._recorded_paths = resolve_patterns(self._modules, patterns)
        self.tokens: tuple[str, ...] = ()  # of the text, if the run was one of a text
        self._edits: dict[str, list[Intervention]] = {}
        store = RecordStore(runs)
        self._runs_by_kind = store.runs
        self._recorder = AttentionRecorder(self._modules, self._recorded_paths, self._edits, store)

    # -- recording ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Trace:
        require(not self._recorder.on, "this trace is already recording; create another one with ch.trace(model)")
        head_edits = [path for path, edits in self._edits.items() if any(e.heads is not None for e in edits)]
        paths = self._recorded_paths["output"] | self._recorded_paths["input"] | set(self._edits)
        attention_layers = self._attending([*self._recorded_paths["weights"], *head_edits])
        self._recorder.start([*(self._modules[path] for path in paths), *attention_layers])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        self._recorder.stop()
        for path, edits in self._edits.items() if error is None else ():
            never = f"the edit on {path or 'the model'} was never applied: the module did not run, or exposes no heads"
            require(self._recorder.applied.issuperset(edits), never)

    def intervene(self, path: str, edit: Intervention) -> Trace:
        """Add an intervention, which is applied to every following run. Returns the trace.

        Args:
            path: Module path.
            edit: A `ZeroAblation`, `MeanAblation`, `ReplaceActivation` or `PatchActivation`. With `heads`, it changes
                the outputs of these heads of an attention layer before the output projection; without, the output of
                any module. Interventions on the same path are applied in order.

        Raises:
            DtypeError: If `edit` is not an intervention.
            ConfigError: If the module does not exist, or `edit` names heads and the module has none.
        """
        if not isinstance(edit, Intervention):
            kind = type(edit).__name__
            raise DtypeError(
                f"got a {kind} as an intervention; expected ZeroAblation, MeanAblation, ReplaceActivation or "
                "PatchActivation"
            )
        path = self._resolve_path(path, "output")
        if edit.heads is not None and not can_attend(self._modules[path]):
            layers = ", ".join(name for name, module in self._modules.items() if is_attention_layer(module))
            raise ConfigError(f"{path} has no heads; edit an attention layer: {layers or 'this model has none'}")
        self._edits.setdefault(path, []).append(edit)
        if self._recorder.on:
            for module in (self._modules[path], *self._attending([path] if edit.heads is not None else [])):
                self._recorder.hook(module)
        return self

    def _attending(self, paths: Sequence[str]) -> list[nn.Module]:
        """Return the modules to hook for attention at these paths.

        An attention layer needs only its own hooks. Whether another module attends is known only when it runs, and the
        recorder assigns a call to the innermost running module, so every module that can attend is hooked.
        """
        modules = [self._modules[path] for path in paths]
        if all(is_attention_layer(module) for module in modules):
            return modules
        return modules_to_hook(self._modules)

    # -- contents ------------------------------------------------------------------------------------------------------

    @property
    def paths(self) -> list[str]:
        """Paths of the recorded attention layers; other modules that attend are added when they run."""
        return [
            path
            for path, module in self._modules.items()
            if path in self._recorded_paths["weights"]
            and (is_attention_layer(module) or path in self._runs_by_kind["weights"])
        ]

    @property
    def outputs(self) -> list[str]:
        """Paths of the modules whose outputs are recorded."""
        return [path for path in self._modules if path in self._recorded_paths["output"]]

    @property
    def runs(self) -> int:
        """Number of recorded runs of the attention layers, or of other modules if no attention layer is recorded."""
        attention = self._runs_by_kind["weights"]
        by_kind = [attention] if attention else self._runs_by_kind.values()
        return max((len(runs) for by_path in by_kind for runs in by_path.values()), default=0)

    def module(self, path: str) -> nn.Module:
        """Return the module at this path."""
        return self._modules[self._resolve_path(path)]

    # -- activations by name ------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Names of the recorded activations: module paths with ".weights", ".output" or ".input"."""
        by_kind = self._runs_by_kind
        return [f"{path}.{kind}".lstrip(".") for path in self._modules for kind in KINDS if path in by_kind[kind]]

    def __getitem__(self, name: str) -> Tensor:
        """Return an activation of the last run by its name.

            t["blocks.0.attention.weights"]
            t["blocks.0.output"]
            t["blocks.0"]                       # the weights of an attention layer, the output of another module

        Raises:
            ConfigError: If it was not recorded.
        """
        path, _, kind = name.rpartition(".")
        if name in self._modules or kind not in KINDS:
            path = name
            kind = "weights" if name in self._runs_by_kind["weights"] else "output"
        if kind == "weights":
            return self.weights(path)
        return self.output(path) if kind == "output" else self.input(path)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    # -- attention ----------------------------------------------------------------------------------------------------

    def weights(
        self, path: str, *, heads: Indices = None, rows: Indices = None, run: int = -1
    ) -> Float[Tensor, "*B h r S"]:
        """Return the attention weights of a layer, before dropout, recomputed for these heads and rows.

        Args:
            path: Path of the attention layer.
            heads: Head index, several, a slice, or None for all.
            rows: Query index, several, a slice, or None for all.
            run: Run index.

        Returns:
            Weights (*B, h, r, S). In a run with a cache, the rows of all steps are concatenated, and keys that did not
            exist yet have weight 0.
        """
        record, last, head_ids, row_ids = self._select(path, run, heads, rows)
        if len(record.steps) == 1 and record.steps[0].batch_index is None:
            return last.weights(head_ids, row_ids, last.acc_dtype)
        shape = (record.size, len(head_ids), len(row_ids), max(step.value.call.S for step in record.steps))
        weights = last.call.q.new_zeros(shape, dtype=last.acc_dtype)
        for step, positions, step_rows in split_by_step(record, row_ids):
            attention = step.value
            part = attention.weights(head_ids, step_rows, attention.acc_dtype)
            weights[:, :, positions, : part.shape[-1]] = step.align_rows(part).to(weights.dtype)
        return weights

    def weight_blocks(self, path: str, head: int, *, run: int = -1) -> Iterator[tuple[int, Float[Tensor, "*B r S"]]]:
        """Iterate over the weights of one head in blocks of rows of bounded size: first row, and weights."""
        record = self._run(path, run)
        for part in recompute.row_blocks(record.steps[-1].value.call, 1, list(range(record.length))):
            yield part[0], self.weights(path, heads=head, rows=part, run=run).squeeze(-3)

    def values(self, path: str, *, heads: Indices = None, run: int = -1) -> Float[Tensor, "*B h S E"]:
        """Return the values of each head; heads that share a key/value head have the same values."""
        record, last, head_ids, _ = self._select(path, run, heads)
        return record.steps[-1].align_rows(recompute.expand_kv_heads(last.call, last.call.v, head_ids))

    def heads(self, path: str, *, heads: Indices = None, run: int = -1) -> Float[Tensor, "*B h T E"]:
        """Return the output of each head before the output projection, as computed by the fast path."""
        record, _, head_ids, _ = self._select(path, run, heads)
        return concat_steps(record, lambda attended: select_indices(attended.heads(), -3, head_ids))

    def attention_inputs(self, path: str, *, run: int = -1) -> AttentionInputs:
        """Return q, k, v, mask and bias of this attention layer; of a run with a cache, those of its last step.

        Raises:
            ConfigError: If the layer computes softmax(q @ k.T) @ v itself, of which only weights and values are known.
        """
        last: AttentionCall = self._run(path, run).steps[-1].value
        if isinstance(last, recompute.WrittenOutCall):
            raise ConfigError(
                f"{path or 'the model'} computes {last.implementation} itself, so q and k are unknown; use weights, "
                "values and heads"
            )
        return last.call

    def difference(self, path: str, *, heads: Indices = None, rows: Indices = None, run: int = -1) -> float:
        """Return the largest difference between recomputed weights times values and the recorded head outputs.

        For `nn.MultiheadAttention`, whose head outputs are not exposed, the layer outputs are compared.
        """
        return self._max_over_steps(recompute.max_difference, path, heads, rows, run)

    def tolerance(self, path: str, *, heads: Indices = None, rows: Indices = None, run: int = -1) -> float:
        """Return the bound for `difference`, derived from the error of the reference against float64 in this dtype."""
        return self._max_over_steps(recompute.difference_tolerance, path, heads, rows, run)

    def report(self, *, rows: Indices = None, run: int = -1) -> str:
        """Return a table with the implementation, the maximum error and the tolerance of each attention layer.

        This recomputes all weights, or those of the queries in `rows`. If no attention was recorded, it returns
        the reason.
        """
        if not self.paths:
            return PreformattedText(self._no_attention_reason())
        return error_table(self, rows, run)

    def layer_sizes(self, path: str, *, run: int = -1) -> tuple[int, int, int]:
        """Return the numbers of heads, queries and keys of an attention layer."""
        record = self._run(path, run)
        call = record.steps[-1].value.call
        return call.q.shape[-3], record.length, call.S

    def implementation(self, path: str, *, run: int = -1) -> str:
        """Return the name of the implementation that computed the attention of a layer."""
        return self._run(path, run).steps[-1].value.implementation

    def _no_attention_reason(self) -> str:
        """Return the reason why this trace contains no attention layer."""
        return no_attention_reason(bool(self._recorded_paths["weights"]), self._recorder.has_run)

    # -- outputs and inputs -------------------------------------------------------------------------------------------

    def output(self, path: str = "", *, run: int = -1) -> Tensor:
        """Return the output of a module (its first tensor if it returns several), concatenated along the sequence."""
        return concat_steps(self._run(path, run, "output"), VersionedRef.get)

    def input(self, path: str = "", *, run: int = -1) -> Tensor:
        """Return the first input tensor of a module, concatenated along the sequence."""
        return concat_steps(self._run(path, run, "input"), VersionedRef.get)

    def norms(self, *, run: int = -1) -> list[tuple[str, Float[Tensor, "*B T"]]]:
        """Return the norms of the residual stream after each block whose output was recorded."""
        parents = {path: self._modules[path.rpartition(".")[0]] for path in self.outputs if path}
        blocks = [path for path, parent in parents.items() if isinstance(parent, (nn.ModuleList, nn.Sequential))]
        example = 'for example ch.trace(model, "**.blocks.*.output")'
        require(bool(blocks), f"no block output is recorded; add a pattern for them, {example}")
        return [(path, self.output(path, run=run).norm(dim=-1)) for path in blocks]

    # -- lookup -------------------------------------------------------------------------------------------------------

    def _run(self, path: str, run: int, kind: str = "weights") -> RecordedRun:
        """Return one recorded run of a module: its "weights", "output" or "input"."""
        runs = self._runs_by_kind[kind]
        paths = self._recorded_paths[kind]
        path = self._resolve_path(path, kind)
        if path not in paths:
            recorded = self.paths if kind == "weights" else sorted(paths)
            quantity = "attention weights were" if kind == "weights" else f"{kind} was"
            raise ConfigError(
                f"no {quantity} recorded for {path or 'the model'}; recorded: "
                f"{', '.join(name or 'the model itself' for name in recorded) or 'none'}"
            )
        if path not in runs and kind == "weights" and not self.paths:
            raise ShapeError(f"{path or 'the model'} has no weights. {self._no_attention_reason()}")
        if path not in runs:
            raise ShapeError(
                f"{path or 'the model'} has not {'attended' if kind == 'weights' else 'run'} inside this trace; "
                "call the model in its `with` block first (code compiled by torch.compile is not recorded)"
            )
        records = runs[path]
        if not -len(records) <= run < len(records):
            n = len(records)
            raise ShapeError(f"run {run} was asked for; {path or 'the model'} has {n}: 0 … {n - 1}")
        return records[run]

    def _select(
        self, path: str, run: int, heads: Indices, rows: Indices = None
    ) -> tuple[RecordedRun, AttentionCall, list[int], list[int]]:
        """Return a run of a layer, the attention call of its last step, and the selected heads and rows."""
        record = self._run(path, run)
        last: AttentionCall = record.steps[-1].value
        head_ids = resolve_indices(heads, last.call.q.shape[-3], "head")
        return record, last, head_ids, resolve_indices(rows, record.length, "row")

    def _max_over_steps(
        self,
        measure: Callable[[AttentionCall, list[int], list[int]], float],
        path: str,
        heads: Indices,
        rows: Indices,
        run: int,
    ) -> float:
        """Return the maximum of a measure over the steps of a run; raise if the layer applied dropout."""
        record, last, head_ids, row_ids = self._select(path, run, heads, rows)
        name = path or "the model"
        if dropout := recompute.dropout_of(last.call):
            raise ConfigError(
                f"{name} applied dropout {dropout:g} to its weights, and recomputed weights are those before dropout; "
                "compare in evaluation mode (model.eval())"
            )
        has_all_heads = not last.heads_merged or len(head_ids) == last.call.q.shape[-3]
        require(
            has_all_heads, f"{name} merges its heads before they can be recorded; omit `heads` to compare all of them"
        )
        return max(
            (measure(step.value, head_ids, step_rows) for step, _, step_rows in split_by_step(record, row_ids)),
            default=0.0,
        )

    def _resolve_path(self, path: str, ending: str = "") -> str:
        """Return a path without its ending; raise ConfigError if the module does not exist."""
        if path not in self._modules:
            path = path.removesuffix(f".{ending}")
        if path not in self._modules:
            raise ConfigError(
                f"{path!r} is not recorded because the model has no module of that name; "
                f"recorded attention layers are: {', '.join(self.paths) or 'none'}"
            )
        return path

    def __repr__(self) -> str:
        sizes = f"Trace({len(self.paths)} attention layers, {len(self.outputs)} outputs, {self.runs} runs)"
        if self.tokens:
            sizes += f" of {len(self.tokens)} tokens: {'|'.join(self.tokens)}"
        return sizes if self.paths or self.outputs else f"{sizes}: {self._no_attention_reason()}"

    def _repr_html_(self) -> str:
        """Return a table of the last run, with a thumbnail of each layer that is short enough."""
        return run_html(self)


@explain_keywords
def trace(model: nn.Module | Pipeline, *patterns: str, runs: int | None = None) -> Trace:
    """Record forward passes of `model`: the activations that the patterns name.

    Args:
        model: Any PyTorch module, or a pipeline.
        *patterns: Such as `"blocks.*.attention.weights"`, `"blocks.*.output"` or `"head.input"`; see
            `clearhead.analysis.tracing.activation_store`. Default: the weights of every attention layer.
        runs: Number of latest runs to keep; None keeps all.

    Returns:
        A `Trace`, to be used as a context manager.
    """
    return Trace(model, *patterns, runs=runs)
