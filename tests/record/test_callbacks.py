"""The callbacks with the real packages: steps are optimiser steps, whatever accumulates."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 2, (32,), generator=torch.Generator().manual_seed(1))


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from gramscope.record.lightning import LightningWatch

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            x, y = batch
            return F.cross_entropy(self(x), y)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def fit(callbacks):
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=4)
        trainer = lightning.Trainer(
            max_epochs=1, accumulate_grad_batches=2, callbacks=callbacks, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path,
        )  # fmt: skip
        module = Module()
        trainer.fit(module, loader)
        return module

    watcher = LightningWatch(probe=(X[:8], Y[:8]), out=tmp_path / "run", every=2, on_error="raise", overhead=None)
    watched, plain = fit([watcher]), fit([])
    for one, two in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)
    assert watcher.scope.count == 4  # eight batches, two for each step
    scalars = gs.open_run(tmp_path / "run").scalars()
    assert list(scalars.index) == [0, 2, 4]
    assert scalars["loss"].notna().sum() == 2
    assert "share/net.0" in scalars
    assert "step/error" in scalars


def test_hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    from gramscope.record.huggingface import TrainerWatch

    def fit(callbacks):
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=2,
            max_position_embeddings=8,
        )  # fmt: skip
        model = transformers.BertForSequenceClassification(config)
        ids = torch.randint(0, 11, (16, 5), generator=torch.Generator().manual_seed(2))
        rows = [{"input_ids": ids[i], "labels": int(Y[i])} for i in range(16)]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "hf"), per_device_train_batch_size=2, gradient_accumulation_steps=2,
            num_train_epochs=1, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", logging_steps=2,
            seed=0,
        )  # fmt: skip
        made = [callback({"input_ids": ids[:4]}, Y[:4]) for callback in callbacks]
        transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=made).train()
        return model, made

    def watcher(x, y):
        options = {"every": 2, "measures": ["loss", "shares"], "on_error": "raise", "overhead": None}
        return TrainerWatch(probe=(x, y), out=tmp_path / "run", **options)

    (watched, (callback,)), (plain, _) = fit([watcher]), fit([])
    for one, two in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)
    assert callback.scope.count == 4  # sixteen examples in batches of two, two batches for each step
    assert list(gs.open_run(tmp_path / "run").scalars().index) == [0, 2, 4]


def _lightning_fit(lightning, folder, watcher, **options):
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.other, self.net = nn.Linear(4, 4), nn.Linear(4, 2)
            self.automatic_optimization = False

        def training_step(self, batch, index):
            x, y = batch
            loss = F.cross_entropy(self.net(torch.tanh(self.other(x.to(self.net.weight.dtype)))), y)
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            return loss

        def configure_optimizers(self):
            return [torch.optim.SGD(self.other.parameters(), lr=0.1), torch.optim.Adam(self.net.parameters(), lr=0.01)]

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8)
    trainer = lightning.Trainer(
        max_epochs=1, callbacks=[watcher], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(Module(), loader)
    return trainer


@pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning")
def test_lightning_again_and_several_optimisers(tmp_path):
    """A second fit goes on with the run; the rehearsed step is that of the optimiser which holds the part watched."""
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from gramscope.record.lightning import LightningWatch

    options = {"every": 2, "measures": ["loss", "step"], "overhead": None, "on_error": "raise", "module": "net"}
    watcher = LightningWatch(probe=(X[:8], Y[:8]), out=tmp_path / "run", **options)
    trainer = _lightning_fit(lightning, tmp_path, watcher)
    assert isinstance(watcher.scope.subject.optimizer, torch.optim.Adam)
    assert watcher.scope.count == trainer.global_step == 8  # four batches, two optimisers
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, trainer.train_dataloader)
    assert watcher.scope.count == trainer.global_step == 16
    _lightning_fit(lightning, tmp_path, watcher)  # another trainer, which counts anew
    assert gs.open_run(tmp_path / "run").steps[-1] == 24


@pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning")
def test_lightning_steps_jumped_over_are_measured_after_them(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from gramscope.record.lightning import LightningWatch

    watcher = LightningWatch(probe=(X[:8], Y[:8]), every=3, measures="norm", overhead=None, module="net")
    _lightning_fit(lightning, tmp_path, watcher)
    assert [record["step"] for record in watcher.scope.records] == [0, 4, 6, 8]  # 8 is the last


@pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning")
def test_lightning_tells_of_all_optimisers_that_move_the_model(tmp_path):
    """Both step in one batch: a step that is due is measured after the second, with the updates of both."""
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from gramscope.record.lightning import LightningWatch

    watcher = LightningWatch(probe=(X[:8], Y[:8]), every=3, measures=["setup", "update"], overhead=None)
    _lightning_fit(lightning, tmp_path, watcher)
    records = {record["step"]: record["scalars"] for record in watcher.scope.records}
    assert list(records) == [0, 4, 6, 8]
    assert not any(name.startswith("not_optimized") for found in records.values() for name in found)
    for step in (4, 6):
        assert records[step]["effective_lr/other"] == pytest.approx(0.1, rel=1e-4)
        assert records[step]["update_ratio/net"] > 0


def test_lightning_from_a_checkpoint_and_in_half_precision(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from gramscope.record.lightning import LightningWatch

    options = {"every": 2, "measures": ["loss", "norm"], "overhead": None, "on_error": "raise", "module": "net"}
    watcher = LightningWatch(probe=(X[:8], Y[:8]), **options)
    trainer = _lightning_fit(lightning, tmp_path, watcher, precision="bf16-true")
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert trainer.lightning_module.net.weight.dtype == torch.bfloat16
    later = LightningWatch(probe=(X[:8], Y[:8]), out=tmp_path / "run", **options)
    loader = trainer.train_dataloader
    again = lightning.Trainer(
        max_epochs=2, callbacks=[later], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path, precision="bf16-true",
    )  # fmt: skip
    again.fit(trainer.lightning_module, loader, ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    assert gs.open_run(tmp_path / "run").steps[0] == 8
    assert later.scope.count == again.global_step == 16


def _hugging_face(tmp_path, watcher, **options):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    ids = torch.randint(0, 11, (16, 5), generator=torch.Generator().manual_seed(2))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "hf"), per_device_train_batch_size=4, report_to=[], disable_tqdm=True, use_cpu=True,
        save_strategy="no", seed=0, **{"num_train_epochs": 1, "logging_steps": 2, **options},
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids]
    model = transformers.GPT2LMHeadModel(config)
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows, callbacks=[watcher]
    )  # fmt: skip


def _language_watcher(tmp_path, measures=("norm",)):
    pytest.importorskip("transformers")
    from gramscope.record.huggingface import TrainerWatch

    ids = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(2))
    return TrainerWatch(
        probe=({"input_ids": ids[:, :-1]}, ids[:, 1:]), out=tmp_path / "run", every=2, measures=list(measures),
        on_error="raise", overhead=None,
    )  # fmt: skip


@pytest.mark.parametrize("when", [{"logging_steps": 2}, {"logging_strategy": "epoch"}])
def test_hugging_face_losses_stand_at_their_steps(tmp_path, when):
    watcher = _language_watcher(tmp_path)
    trainer = _hugging_face(tmp_path, watcher, **when)
    trainer.train()
    scalars = gs.open_run(tmp_path / "run").scalars()
    said = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    assert said
    assert scalars["loss"].dropna().to_dict() == said
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.evaluate(trainer.train_dataset)  # logs too, after the watch was closed
    assert not [w for w in warned if issubclass(w.category, gs.record.WatchWarning)]


def test_hugging_face_language_model_again_and_interrupted(tmp_path):
    watcher = _language_watcher(tmp_path, ["loss", "norm"])
    trainer = _hugging_face(tmp_path, watcher)
    trainer.train()
    assert "accuracy/probe" in watcher.scope.records[-1]["scalars"]
    trainer.train()
    assert gs.open_run(tmp_path / "run").steps[-1] == 8
    real, calls = trainer.training_step, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    trainer.training_step = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.training_step = real
    trainer.train()
    assert gs.open_run(tmp_path / "run").steps[-1] == 14


def test_hugging_face_evaluations_stand_at_their_steps(tmp_path):
    """An evaluation is logged after the loss of its step, and after the record of its step."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    from gramscope.record.huggingface import TrainerWatch

    ids = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(2))
    probe = ({"input_ids": ids[:, :-1]}, ids[:, 1:])
    watcher = TrainerWatch(probe=probe, out=tmp_path / "run", every=5, measures="norm", on_error="raise", overhead=None)
    options = {"eval_strategy": "steps", "eval_steps": 10, "logging_steps": 5, "max_steps": 25}
    trainer = _hugging_face(tmp_path, watcher, **options)
    trainer.train()
    assert isinstance(trainer, transformers.Trainer)
    run = gs.open_run(tmp_path / "run")
    for name, steps in (("loss", {5, 10, 15, 20, 25}), ("eval_loss", {10, 20}), ("learning_rate", {5, 10, 15, 20, 25})):
        said = {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}
        assert steps <= set(said)
        assert run.logged()[name].to_dict() == said
        assert run.scalars()[name].dropna().to_dict() == said
        assert watcher.scope.logged[name] == said
    assert run.steps == [0, 5, 10, 15, 20, 25]


def test_a_name_that_is_taken_does_not_stop_a_trainer(tmp_path):
    watcher = _language_watcher(tmp_path, ["norm"])
    trainer = _hugging_face(tmp_path, watcher)
    real = trainer.log
    trainer.log = lambda logs, *more: real({**logs, "overhead": 1.0, "norm/parameters": 2.0}, *more)
    with pytest.warns(gs.record.WatchWarning, match="is measured by the watch and cannot be logged"):
        trainer.train()
    assert watcher.scope.count == 4
    assert "loss" in watcher.scope.logged


class _Logging:
    """A LightningModule that logs by step, by epoch, by both, now and then, and in its evaluations."""

    def __new__(cls, lightning, **options):
        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.net, self.said = nn.Linear(4, 2), []

            def training_step(self, batch, index):
                loss = F.cross_entropy(self.net(batch[0]), batch[1])
                self.log("train_loss", loss)
                self.log("both", loss, on_step=True, on_epoch=True)
                if index == 2:
                    self.log("rare", 7.0 + self.trainer.global_step)
                self.said.append(float(loss))
                return loss

            def on_train_batch_end(self, outputs, batch, index):
                self.log("after_batch", float(self.trainer.global_step))

            def on_train_epoch_end(self):
                self.log("after_epoch", float(self.trainer.global_step))

            def on_validation_epoch_end(self):
                self.log("after_validation", float(self.trainer.global_step))

            def validation_step(self, batch, index):
                self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        return Module()


def _fit_logging(lightning, folder, accumulate=1, watched=True, **options):
    from gramscope.record.lightning import LightningWatch

    watcher = LightningWatch(
        probe=(X[:8], Y[:8]), out=folder / "run", every=3, measures="norm", on_error="raise", overhead=None
    )
    module = _Logging(lightning)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8)
    evaluated = {}

    class Listener(lightning.Callback):
        """What EarlyStopping and ModelCheckpoint would see, and when."""

        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                evaluated[trainer.global_step] = float(trainer.callback_metrics["val_loss"])

    callbacks = [watcher, Listener()] if watched else [Listener()]
    trainer = lightning.Trainer(
        max_epochs=2, callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", default_root_dir=folder,
        accumulate_grad_batches=accumulate, **options,
    )  # fmt: skip
    trainer.fit(module, loader, loader)
    module.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return watcher.scope, module, evaluated


@pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning")
def test_lightning_numbers_stand_at_their_steps(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    scope, module, evaluated = _fit_logging(lightning, tmp_path, val_check_interval=2)
    _, plain, unwatched = _fit_logging(lightning, tmp_path / "b", watched=False, val_check_interval=2)
    assert (module.metrics, evaluated, module.said) == (plain.metrics, unwatched, plain.said)
    losses = dict(enumerate(module.said, 1))
    assert list(evaluated) == [2, 4, 6, 8]
    logged = {name: series.to_dict() for name, series in gs.open_run(tmp_path / "run").logged().items()}
    assert logged == scope.logged
    assert logged["val_loss"] == pytest.approx(evaluated)
    assert logged["train_loss"] == pytest.approx(losses)
    assert logged["loss"] == pytest.approx(losses)
    assert logged["both_step"] == pytest.approx(losses)
    epochs = {4: sum(module.said[:4]) / 4, 8: sum(module.said[4:]) / 4}
    assert logged["both_epoch"] == pytest.approx(epochs)
    assert "both" not in logged, "it would be a mixture of the two"
    assert logged["rare"] == {3: 9.0, 7: 13.0}, "an old number is not logged again"
    assert logged["after_batch"] == {step: float(step) for step in losses}
    assert logged["after_epoch"] == {4: 4.0, 8: 8.0}
    assert logged["after_validation"] == {step: float(step) for step in evaluated}


@pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning")
def test_lightning_loss_of_several_batches(tmp_path):
    """Lightning divides each batch's loss by their number; together they are the loss that was stepped on."""
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    scope, module, _ = _fit_logging(lightning, tmp_path, accumulate=2)
    said = module.said
    means = {step: (said[2 * step - 2] + said[2 * step - 1]) / 2 for step in (1, 2, 3, 4)}
    assert scope.logged["loss"] == pytest.approx(means)
    assert scope.logged["train_loss"] == pytest.approx({step: said[2 * step - 1] for step in means})
    assert list(scope.logged["val_loss"]) == [2, 4]
    assert scope.logged["after_batch"] == {step: float(step) for step in means}
