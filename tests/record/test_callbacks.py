"""The callbacks with the real packages: steps are optimiser steps, whatever accumulates."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 2, (32,), generator=torch.Generator().manual_seed(1))


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from gramscope.record.lightning import WatchCallback

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

    watcher = WatchCallback(probe=(X[:8], Y[:8]), out=tmp_path / "run", every=2, on_error="raise", overhead=None)
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
    from gramscope.record.huggingface import WatchCallback

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
        return WatchCallback(probe=(x, y), out=tmp_path / "run", **options)

    (watched, (callback,)), (plain, _) = fit([watcher]), fit([])
    for one, two in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)
    assert callback.scope.count == 4  # sixteen examples in batches of two, two batches for each step
    assert list(gs.open_run(tmp_path / "run").scalars().index) == [0, 2, 4]
