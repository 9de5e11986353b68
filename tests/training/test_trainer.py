"""The training loop: steps, log, validation, checkpoints, signals, early stopping and averaging."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from clearhead.data.sampler import Batches, TokenBudget
from clearhead.data.tasks.sort_dedup import SortDedup
from clearhead.errors import StorageError
from clearhead.models import DecoderConfig, storage
from clearhead.training import (
    DivergedError,
    EarlyStopping,
    Progress,
    Recipe,
    TrainConfig,
    WarmupCosine,
    checkpoint,
    read_log,
    train,
)
from clearhead.training.objective import Objective, loss_sum, scores
from clearhead.training.trainer import Trainer
from tests.training.tiny import SETTINGS, At, assert_same_run, exported, final, rows


def run(folder, **settings):
    return train("sort-dedup", out=folder, overrides=SETTINGS | settings)


# ---------------------------------------------------------------------- the loss


class Fixed(nn.Module):
    """Gives the same logits whatever it is asked."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, ids):
        return self.logits


@pytest.mark.parametrize("smoothing", [0.0, 0.13])
def test_loss_sum_equals_definition(smoothing):
    task = SortDedup(n_symbols=5, max_length=7, n_train=31, n_validation=11)
    batch = task.validation.batch(torch.arange(11))
    V = task.tokenizer.vocab_size
    logits = torch.randn(*batch.labels.shape, V, dtype=torch.float64)
    total, count = loss_sum(Fixed(logits), batch, Objective(smoothing=smoothing)), batch.n_labels
    expected, n = 0.0, 0
    for b, t in batch.weights.nonzero().tolist():
        logs = logits[b, t] - logits[b, t].exp().sum().log()
        target = torch.full((V,), smoothing / V, dtype=torch.float64)
        target[batch.labels[b, t]] += 1 - smoothing
        expected -= float((target * logs).sum())
        n += 1
    assert count == n
    assert total.item() == pytest.approx(expected, rel=1e-5)
    plain, right = scores(Fixed(logits), batch).tolist()
    assert right == sum(int(logits[b, t].argmax() == batch.labels[b, t]) for b, t in batch.weights.nonzero().tolist())
    if not smoothing:
        assert plain == pytest.approx(expected, rel=1e-5)


def test_loss_sum_r_drop_adds_divergence_of_two_passes():
    """R-Drop by its definition: ½ (CE₁ + CE₂) + α/2 · ½ (KL(p₁‖p₂) + KL(p₂‖p₁)), summed over the labels that count."""
    task = SortDedup(n_symbols=5, max_length=7, n_train=31, n_validation=11)
    batch = task.validation.batch(torch.arange(11))
    draws = torch.randn(2, *batch.labels.shape, task.tokenizer.vocab_size)
    alpha, counts = 0.7, batch.weights > 0
    logs = [draw[counts].double().log_softmax(-1) for draw in draws]  # (n, V) each
    entropies = [F.nll_loss(log, batch.labels[counts], reduction="sum").item() for log in logs]
    apart = sum(F.kl_div(a, b, reduction="sum", log_target=True).item() for a, b in (logs, logs[::-1]))
    total = loss_sum(Fixed(draws.flatten(0, 1)), batch, Objective(r_drop_alpha=alpha)).item()
    assert total == pytest.approx(sum(entropies) / 2 + alpha / 4 * apart, rel=1e-5)
    same = loss_sum(Fixed(draws[:1].expand(2, -1, -1, -1).flatten(0, 1)), batch, Objective(r_drop_alpha=alpha)).item()
    assert same == pytest.approx(entropies[0], rel=1e-5)


# ---------------------------------------------------------------------- against a loop written out


@pytest.mark.parametrize("accumulation", [1, 3])
def test_trainer_equals_a_plain_loop(tmp_path, accumulation):
    """The same model trained here by a dozen lines of plain torch: joined batches, means, torch's own parts.

    The gradient of key biases is 0 up to rounding. With a small eps, AdamW would amplify the rounding errors, which
    depend on the processor."""
    run(
        tmp_path / "run",
        accumulation=accumulation,
        **{"train.eps": 1e-4},
        clip=0.7,
        label_smoothing=0.1,
        weight_decay=0.2,
        eval_every=99,
    )
    recipe = Recipe.load(tmp_path / "run")
    torch.manual_seed(recipe.train.seed)
    task = recipe.data.load(seed=recipe.train.seed)
    model = recipe.model.build()
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and "embedding" not in name]
    no_decay = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": no_decay, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.98), eps=1e-4, fused=False, foreach=False)
    batches = Batches(task.train, TokenBudget(131), seed=0).forever()
    written = [row for row in read_log(tmp_path / "run") if row["kind"] == "train"]
    assert len(written) == 11
    for step, row in enumerate(written, start=1):
        losses = []
        for _ in range(accumulation):
            batch = next(batches)
            logits = model(batch.ids)
            each = F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none", label_smoothing=0.1)
            losses.append(each[batch.weights > 0])
        mean = torch.cat(losses).mean()
        mean.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        for group in optimiser.param_groups:
            group["lr"] = WarmupCosine(0.01, 2, 11)(step)
        optimiser.step()
        optimiser.zero_grad()
        assert row["step"] == step
        assert row["loss"] == pytest.approx(mean.item(), rel=2e-4)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=2e-3)
        assert row["lr"] == WarmupCosine(0.01, 2, 11)(step)
    trained = exported(tmp_path / "run")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_log_row_is_the_mean_over_its_interval(tmp_path):
    run(tmp_path / "each")
    run(tmp_path / "some", log_every=4)
    some = [row for row in rows(tmp_path / "some") if row["kind"] == "train"]
    assert [row["step"] for row in some] == [4, 8, 11]
    assert some[-1]["tokens"] == rows(tmp_path / "each")[-2]["tokens"]


def test_validation_loss_is_that_of_the_exported_model(tmp_path):
    summary = run(tmp_path / "run")
    model = storage.load_checkpoint(summary.model)
    task = Recipe.load(summary.model).data.load(seed=0)
    batch = task.validation.batch(torch.arange(len(task.validation)))
    with torch.no_grad():
        total, right = scores(model, batch).tolist()
    assert summary.valid_loss == pytest.approx(total / batch.n_labels, rel=1e-5)
    assert summary.valid_accuracy == pytest.approx(right / batch.n_labels)


# ---------------------------------------------------------------------- ending before the end


def test_signal_before_the_first_log_row_saves(tmp_path):
    summary = train(
        "sort-dedup",
        out=tmp_path / "part",
        overrides=SETTINGS | {"log_every": 10},
        progress=At(1, lambda: os.kill(os.getpid(), signal.SIGINT)),
    )
    assert summary.message.startswith("SIGINT received: saved after step 1 of 11. Resume with: ")
    assert (tmp_path / "part/summary.json").is_file()
    assert train(resume=tmp_path / "part").ending == "finished"


def _two_signals():
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)


def test_second_signal_stops_at_once_and_names_the_last_checkpoint(tmp_path):
    folder = tmp_path / "part"
    with pytest.raises(KeyboardInterrupt) as interruption:
        train("sort-dedup", out=folder, overrides=SETTINGS, progress=At(7, _two_signals))
    assert str(interruption.value) == (
        f"stopped without saving: the last checkpoint is {folder / 'step-00000006'}. "
        f"Resume with: clearhead train --resume {folder}"
    )
    assert not (folder / "step-00000007").exists()
    assert train(resume=folder).ending == "finished"
    run(tmp_path / "whole")
    assert_same_run(tmp_path / "whole", folder)


def test_second_signal_before_the_first_checkpoint_restarts_the_run(tmp_path):
    with pytest.raises(KeyboardInterrupt, match=r"stopped before the first checkpoint\. Start again with: "):
        train("sort-dedup", out=tmp_path / "part", overrides=SETTINGS, progress=At(2, _two_signals))
    assert train(resume=tmp_path / "part").ending == "finished"
    run(tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "part")


def test_second_signal_while_saving_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    save = checkpoint.save_tensors

    def interrupted(path, *arguments):
        save(path, *arguments)
        if path.parent.name == ".step-00000008.new":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(checkpoint, "save_tensors", interrupted)
    first_signal = At(8, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match=r"the last checkpoint is \S+/step-00000006\. "):
        train("sort-dedup", out=tmp_path / "part", overrides=SETTINGS, progress=first_signal)
    monkeypatch.undo()
    assert train(resume=tmp_path / "part").ending == "finished"
    run(tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "part")


def test_train_in_a_thread_ignores_signals(tmp_path):
    endings = []
    thread = threading.Thread(target=lambda: endings.append(run(tmp_path / "run").ending))
    thread.start()
    thread.join()
    assert endings == ["finished"]


class DivergeAt(Progress):
    """Make the logits of one step NaN, by a hook on the model, and record the ids of each later batch."""

    def __init__(self, step):
        self.step = step
        self.ids = []

    def on_train_begin(self, info):
        self.model = info.model

    def on_step_end(self, step):
        if step == self.step - 1:
            self.model.register_forward_hook(self.diverge)

    def diverge(self, model, args, logits):
        self.ids.append(args[0])
        return logits * math.nan


def test_non_finite_loss_raises_diverged_error(tmp_path):
    fault = DivergeAt(8)
    with pytest.raises(DivergedError) as caught:
        train("sort-dedup", out=tmp_path / "run", overrides=SETTINGS | {"eval_every": 99}, progress=fault)
    error = caught.value
    assert error.step == 8
    assert error.checkpoint == tmp_path / "run/step-00000006"
    (batch_info,) = error.batches
    split = Recipe.load(tmp_path / "run").data.load(seed=0).train
    assert torch.equal(split.batch(batch_info.examples, epoch=batch_info.epoch).ids, fault.ids[0])
    assert (
        f"at step 8 (epoch {batch_info.epoch}, batch {batch_info.index} of {batch_info.n_batches}, "
        f"examples {batch_info.examples[0]}" in str(error)
    )
    assert "the last good checkpoint is" in str(error)
    parameters = load_file(tmp_path / "run/step-00000006/model.safetensors")
    assert all(tensor.isfinite().all() for tensor in parameters.values())
    assert not (tmp_path / "run/step-00000008").exists()
    assert train(resume=tmp_path / "run").ending == "finished"
    run(tmp_path / "whole", eval_every=99)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_early_stopping_exports_the_best_parameters(tmp_path):
    """A learning rate that destroys the model: the first validations are the best, and the export is of them."""
    summary = run(
        tmp_path / "run",
        steps=60,
        eval_every=3,
        lr_max=3.0,
        warmup_steps=50,
        early_stopping='{type = "EarlyStopping", patience = 3}',
    )
    validations = [row for row in rows(tmp_path / "run") if row["kind"] == "valid"]
    losses = [row["loss"] for row in validations]
    best = min(range(len(losses)), key=losses.__getitem__)
    assert summary.ending == "stopped early"
    assert summary.best_step == validations[best]["step"]
    assert len(losses) - 1 - best == 3
    assert summary.best_loss == losses[best] < losses[-1]
    model = storage.load_checkpoint(summary.model)
    task = Recipe.load(summary.model).data.load(seed=0)
    batch = task.validation.batch(torch.arange(len(task.validation)))
    with torch.no_grad():
        assert scores(model, batch)[0].item() / batch.n_labels == pytest.approx(summary.best_loss, rel=1e-5)
    again = train(resume=tmp_path / "run")
    assert (again.ending, again.steps) == ("stopped early", summary.steps)


def test_early_stopping_min_delta_requires_larger_improvement(tmp_path):
    choice = EarlyStopping(patience=2, min_delta=100.0)
    assert run(tmp_path / "run", early_stopping=choice).best_step == 4  # the first of all counts, none after it does


def test_nan_validation_loss_is_not_the_best(tmp_path, monkeypatch):
    measured = iter([math.nan, 3.0, 2.0, 4.0, math.nan])
    monkeypatch.setattr(Trainer, "evaluate", lambda self, weights=None: (next(measured), 0.5))
    summary = run(tmp_path / "run", steps=20, eval_every=4, keep_best=True)
    assert (summary.best_step, summary.best_loss) == (12, 2.0)


def test_trainer_exports_the_average(tmp_path):
    run(tmp_path / "plain")
    run(tmp_path / "mean", averaging='{type = "EMA", decay = 0.8}')
    last, averaged = final(tmp_path / "plain"), final(tmp_path / "mean")
    result = exported(tmp_path / "mean")
    for name, tensor in result.items():
        assert torch.equal(averaged[name], last[name])  # training itself is not changed by it
        assert torch.equal(tensor, averaged[f"average/{name}"])
    assert not torch.equal(result["norm.weight"], last["norm.weight"])


def test_trainer_keeps_the_requested_number_of_checkpoints(tmp_path):
    run(tmp_path / "run", keep=2)
    assert [c.step for c in checkpoint.valid_checkpoints(tmp_path / "run")] == [11, 9]


def test_train_does_not_change_the_callers_random_state(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    run(tmp_path / "run", dropout=0.1)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.compiled
@pytest.mark.parametrize(("task", "most"), [("sort-dedup", 2), ("translation", 4)])
def test_compiled_trainer_uses_few_graphs_for_all_shapes(tmp_path, monkeypatch, task, most):
    """What compiling traces, run as it was traced: the same losses, and no new graph for a new shape.

    One graph for each kind of block and one for the loss; a decoder's block may have a second, for lengths that happen
    to be equal."""
    graphs = []

    def as_traced(graph, example):
        graphs.append(graph)
        return graph.forward

    settings: dict = SETTINGS | {"steps": 9, "eval_every": 99}
    data = None
    if task == "translation":
        names = ("n_symbols", "max_length", "n_train", "n_validation", "n_layers")
        settings = {name: value for name, value in settings.items() if name not in names}
        settings |= {"data.vocab_size": 300, "n_encoder_layers": 2, "n_decoder_layers": 3, "dropout": 0.0}
        data = tmp_path / "pairs.tsv"
        data.write_text("".join(f"{'a b ' * (n % 5 + 1)}{n}\t{n} {'cd ' * (n % 7 + 1)}\n" for n in range(199)))
    train(task, data=data, out=tmp_path / "eager", overrides=settings)
    real = torch.compile

    def compile(function, **choices):
        return real(function, backend=as_traced, fullgraph=True, **choices)

    monkeypatch.setattr(torch, "compile", compile)
    train(task, data=data, out=tmp_path / "compiled", overrides=settings | {"compile": True})
    assert 2 <= len(graphs) <= most
    for eager, compiled in zip(rows(tmp_path / "eager"), rows(tmp_path / "compiled"), strict=True):
        assert eager["loss"] == pytest.approx(compiled["loss"], rel=1e-4)


def tiny_trainer(folder, **options):
    model = DecoderConfig(vocab_size=9, d_model=4, n_heads=1, n_layers=1, max_len=40).build()
    task = SortDedup(n_symbols=5, max_length=7, n_train=31, n_validation=11)
    return Trainer(model, task, TrainConfig(steps=1, device="cpu"), folder, **options)


class FailingStart(Progress):
    def on_train_begin(self, info):
        raise KeyError("start")


def test_log_is_closed_if_a_callback_fails_at_the_start(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        trainer = tiny_trainer(tmp_path, progress=FailingStart())
        with pytest.raises(KeyError, match="start"):
            trainer.run()
        del trainer
        gc.collect()
    assert [str(warning.message) for warning in caught if "log.jsonl" in str(warning.message)] == []


def test_trainer_in_a_file_raises_storage_error(tmp_path):
    folder = tmp_path / "file"
    folder.write_text("x")
    trainer = tiny_trainer(folder)
    with pytest.raises(StorageError, match=f"cannot train in {folder}: File exists; choose another folder"):
        trainer.run()
