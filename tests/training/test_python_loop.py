"""The training loop from Python: own modules, datasets and loaders, callbacks, and experiment trackers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from clearhead.data import DatasetSplit, DatasetTask, FixedSize, InputBatch, TokenBatch, TokenBudget
from clearhead.errors import DataError
from clearhead.training import ExperimentLogger, Progress, TrainConfig, Trainer, read_log, train
from tests.training.tiny import SETTINGS, final, rows

N, WIDTH, CLASSES = 53, 5, 3


class Points(Dataset):
    """Points whose class is the largest of three of their coordinates."""

    def __init__(self, n=N, seed=0):
        self.inputs = torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))
        self.labels = self.inputs[:, :CLASSES].argmax(1)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


class Unindexed(IterableDataset):
    def __iter__(self):
        return iter(Points())


def classifier():
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, CLASSES))


CONFIG = TrainConfig(steps=20, batch=FixedSize(11), device="cpu", log_every=1, eval_every=5, checkpoint_every=5)


@pytest.mark.filterwarnings("ignore:.*lacks:RuntimeWarning")
@pytest.mark.parametrize("background", [False, True])
def test_trainer_on_a_dataset_equals_a_plain_loop(tmp_path, background):
    model, reference = classifier(), classifier()
    reference.load_state_dict(model.state_dict())
    data, held_out = Points(), Points(17, seed=1)
    task = DatasetTask(train=DatasetSplit(data, background=background), validation=DatasetSplit(held_out))
    trainer = Trainer(model, task, CONFIG, tmp_path / "run")
    assert trainer.run() == "finished"
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in reference.parameters() if p.dim() > 1], "weight_decay": CONFIG.weight_decay},
            {"params": [p for p in reference.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=CONFIG.betas,
        eps=CONFIG.eps,
    )
    positions = trainer.batches.positions()
    logged = [row for row in read_log(tmp_path / "run") if row["kind"] == "train"]
    for step, row in enumerate(logged, start=1):
        epoch, index = next(positions)
        examples = trainer.batches.groups(epoch)[index]
        loss = nn.functional.cross_entropy(reference(data.inputs[examples]), data.labels[examples])
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = CONFIG.rates(20)(step)
        optimizer.step()
        optimizer.zero_grad()
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-4)
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(parameter, reference.state_dict()[name], rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        accuracy = (reference(held_out.inputs).argmax(1) == held_out.labels).double().mean().item()
    assert trainer.summary.valid_accuracy == pytest.approx(accuracy)
    assert trainer.summary.steps == 20


@pytest.mark.filterwarnings("ignore:.*lacks:RuntimeWarning")
def test_trainer_on_a_dataset_resumed_equals_uninterrupted(tmp_path):
    task = DatasetTask(train=DatasetSplit(Points()), validation=DatasetSplit(Points(17, seed=1)))
    initial = classifier().state_dict()

    def trainer(folder, steps):
        model = classifier()
        model.load_state_dict(initial)
        return Trainer(model, task, CONFIG.replace(steps=steps), folder)

    trainer(tmp_path / "whole", 20).run()
    trainer(tmp_path / "part", 10).run()
    # The first half has the schedule of ten steps, so only positions in the data are compared.
    resumed = trainer(tmp_path / "part", 20)
    assert resumed.resume()
    assert resumed.run() == "finished"
    whole, part = rows(tmp_path / "whole"), rows(tmp_path / "part")
    assert [(row["step"], row.get("epoch"), row.get("tokens")) for row in part if row["kind"] == "train"] == [
        (row["step"], row.get("epoch"), row.get("tokens")) for row in whole if row["kind"] == "train"
    ]
    assert final(tmp_path / "whole").keys() == final(tmp_path / "part").keys()


def test_dataset_split_from_loader_uses_its_dataset_and_collate_function():
    data = Points()
    plain = DatasetSplit.from_loader(DataLoader(data, batch_size=4, shuffle=True))
    batch = plain.batch(torch.tensor([7, 2]))
    assert torch.equal(batch.inputs, data.inputs[[7, 2]])
    assert torch.equal(batch.labels, data.labels[[7, 2]])
    assert (batch.n_labels, batch.n_tokens) == (2, 2)

    def collate(examples):
        return {"x": torch.stack([x for x, _ in examples]), "y": torch.stack([y for _, y in examples])}

    named = DatasetSplit.from_loader(
        DataLoader(data, collate_fn=collate), lambda batch: InputBatch.of(batch["x"], batch["y"])
    )
    assert torch.equal(named.batch(torch.tensor([7, 2])).inputs, batch.inputs)


def test_dataset_split_lengths_serve_a_token_budget(tmp_path):
    texts = [torch.arange(2 + n % 5) for n in range(29)]

    def collate(examples):
        ids = nn.utils.rnn.pad_sequence(examples, batch_first=True)
        lengths = torch.tensor([len(example) for example in examples])
        weights = (torch.arange(ids.shape[1]) < lengths[:, None]).float()
        sizes = {"n_tokens": int(lengths.sum()), "n_padded": ids.numel(), "n_labels": int(weights.sum())}
        return TokenBatch(ids=ids, lengths=lengths, labels=ids, weights=weights, **sizes)

    split = DatasetSplit(texts, collate, lengths=[len(text) for text in texts])
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7))
    config = TrainConfig(steps=5, batch=TokenBudget(13), device="cpu")
    trainer = Trainer(model, DatasetTask(train=split, validation=split), config, tmp_path / "run")
    with pytest.warns(RuntimeWarning, match="lacks"):
        trainer.run()
    for group in trainer.batches.groups(0):
        sizes = [len(texts[i]) for i in group.tolist()]
        assert max(sizes) * len(sizes) <= 13


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DatasetSplit(Unindexed()), "Unindexed has no length; expected a map-style dataset"),
        (lambda: DatasetSplit(Points(), lengths=[1]), "lengths has 1 items, expected one for each of the 53 examples"),
        (lambda: DatasetSplit(Points(), collate=list).batch(torch.tensor([0])), "collate returned a list; expected"),
    ],
    ids=["iterable", "lengths", "collate"],
)
def test_dataset_split_invalid_input_raises_data_error(make, message):
    with pytest.raises(DataError, match=message):
        make()


# ---------------------------------------------------------------------- callbacks


class Recorder(Progress):
    """Records the calls of all callbacks."""

    def __init__(self):
        self.calls = []

    def on_train_begin(self, info):
        self.calls.append(("begin", info.first_step))
        self.info = info

    def on_step_end(self, step):
        self.calls.append(("step", step))

    def on_log(self, row):
        self.calls.append(("log", row["step"]))

    def on_evaluate(self, row):
        self.calls.append(("evaluate", row["step"]))

    def on_save(self, step, folder):
        self.calls.append(("save", step))

    def on_train_end(self, summary):
        self.calls.append(("end", summary.ending))


EXPECTED_CALLS = [
    ("begin", 0),
    *[call for step in (1, 2, 3) for call in (("step", step), ("log", step))],
    ("evaluate", 3),
    ("step", 4),
    ("log", 4),
    ("evaluate", 4),
    ("save", 4),
    ("end", "finished"),
]


def test_train_calls_each_of_several_callbacks_in_order(tmp_path):
    first, second = Recorder(), Recorder()
    settings = SETTINGS | {"steps": 4, "eval_every": 3, "checkpoint_every": 99}
    summary = train("sort-dedup", out=tmp_path / "run", overrides=settings, progress=[first, second])
    assert first.calls == second.calls == EXPECTED_CALLS
    assert first.info.task == summary.task == "sort-dedup"
    assert first.info.n_parameters == summary.n_parameters
    assert first.info.tokenizer.vocab_size == first.info.model.config.vocab_size


@pytest.mark.filterwarnings("ignore:.*lacks:RuntimeWarning")
def test_trainer_calls_its_callbacks(tmp_path):
    recorder = Recorder()
    model = classifier()
    task = DatasetTask(train=DatasetSplit(Points()), validation=DatasetSplit(Points(17, seed=1)), name="points")
    config = CONFIG.replace(steps=4, eval_every=3, checkpoint_every=99)
    Trainer(model, task, config, tmp_path / "run", progress=recorder).run()
    assert recorder.calls == EXPECTED_CALLS
    assert recorder.info.model is model
    assert (recorder.info.task, recorder.info.preset, recorder.info.n_train) == ("points", "custom", N)


def test_callback_can_sample_from_the_model_without_changing_the_run(tmp_path):
    class Samples(Progress):
        def on_train_begin(self, info):
            self.model, self.tokenizer, self.texts = info.model, info.tokenizer, []

        def on_evaluate(self, row):
            from clearhead.generation import Sample, generate

            prompt = [*self.tokenizer.prompt("D A A"), self.tokenizer.bos_id]
            with torch.random.fork_rng(devices=[]):
                result = generate(self.model, [prompt], strategy=Sample(temperature=0.8, seed=1), max_new_tokens=5)
            assert self.model.training
            self.texts.append(self.tokenizer.decode(result.sequence(0).tolist()))

    samples = Samples()
    settings = SETTINGS | {"dropout": 0.2}
    train("sort-dedup", out=tmp_path / "sampled", overrides=settings, progress=samples)
    train("sort-dedup", out=tmp_path / "plain", overrides=settings)
    assert len(samples.texts) == 3
    assert rows(tmp_path / "sampled") == rows(tmp_path / "plain")


def test_experiment_logger_sends_each_row(tmp_path):
    class FakeRun:
        def __init__(self):
            self.logged = []

        def log(self, data, *, step):
            self.logged.append((step, data))

    tracker = FakeRun()
    train("sort-dedup", out=tmp_path / "run", overrides=SETTINGS, progress=[ExperimentLogger(tracker)])
    log = read_log(tmp_path / "run")
    assert [step for step, _ in tracker.logged] == [row["step"] for row in log]
    for (_, data), row in zip(tracker.logged, log, strict=True):
        prefix = row["kind"]
        assert data == {f"{prefix}/{name}": value for name, value in row.items() if name not in ("kind", "step")}


def test_tensorboard_files_contain_the_log(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is optional")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train("sort-dedup", out=tmp_path / "run", overrides=SETTINGS)
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    expected = [(row["step"], row["loss"]) for row in read_log(tmp_path / "run") if row["kind"] == "train"]
    actual = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in actual] == [step for step, _ in expected]
    assert [value for _, value in actual] == pytest.approx([value for _, value in expected], rel=1e-6)
