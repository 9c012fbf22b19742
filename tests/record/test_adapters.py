"""Records in TensorBoard, Weights & Biases and MLflow, read back with the real packages."""

import time

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.record import adapters

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 2


def watched(forward):
    """Steps 0, 2 and 4 of a short run, as its own records have them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    options = {"every": 2, "overhead": None, "on_error": "raise", "measures": ["loss", "shares"]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gs.watch(model, (X, Y), forward=forward, **options) as scope:
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X), Y).backward()
            optimizer.step()
            scope.step()
    return {record["step"]: record["scalars"] for record in scope.records}


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = watched(gs.to_tensorboard(tmp_path / "tb"))
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    for name in ("loss/probe", "share/0", "share/2"):
        seen = {event.step: event.value for event in events.Scalars(name)}
        assert seen == pytest.approx({step: scalars[name] for step, scalars in records.items()})
        assert list(seen) == [0, 2, 4]


def test_a_writer_of_the_users_own(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        gs.to_tensorboard(writer)({"loss/probe": 1.0}, 3)
    assert list(tmp_path.glob("events*"))
    with pytest.raises(InputError, match="a log directory or a SummaryWriter, got int"):
        gs.to_tensorboard(3)


def stored(data):
    """Records of wandb's file: LevelDB's log format, 32 KiB blocks of (checksum, length, kind, bytes)."""
    place, whole = 7, b""  # after the header of the file
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if place + 7 + length > len(data):
            return  # still being written
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def history(folder):
    """What an offline run logged, row by row."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.rglob("*.wandb")
    limit = time.monotonic() + 60
    found = []
    while not any(record.WhichOneof("record_type") == "exit" for record in found):  # finish() may return before it
        assert time.monotonic() < limit, "wandb has not written the end of its run within a minute"
        time.sleep(0.05)
        found = [Record.FromString(data) for data in stored(path.read_bytes())]
    rows = [record.history.item for record in found if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): item.value_json for item in row} for row in rows]


def test_wandb_offline(tmp_path):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    run = wandb.init(mode="offline", dir=tmp_path, project="test", settings=wandb.Settings(silent=True))
    records = watched(gs.to_wandb())  # the run that is open
    assert dict(run.summary)["gramscope/loss/probe"] == pytest.approx(records[4]["loss/probe"])
    with pytest.raises(InputError, match="a run was given with project"):
        gs.to_wandb(run, project="other")
    run.finish()
    rows = history(tmp_path)
    assert [int(row["gramscope/step"]) for row in rows] == [0, 2, 4]
    for row, scalars in zip(rows, records.values(), strict=True):
        for name in ("loss/probe", "share/0"):
            assert float(row[f"gramscope/{name}"]) == pytest.approx(scalars[name])


def test_mlflow_in_files(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    try:
        with mlflow.start_run() as run:
            forward = gs.to_mlflow()
        records = watched(forward)
        forward({"share/a[0]": 1.0}, 7)
        client = mlflow.MlflowClient()
        for name in ("loss/probe", "share/0"):
            seen = {m.step: m.value for m in client.get_metric_history(run.info.run_id, f"gramscope/{name}")}
            assert seen == pytest.approx({step: scalars[name] for step, scalars in records.items()})
        assert client.get_metric_history(run.info.run_id, "gramscope/share/a_0_")[0].step == 7
    finally:
        mlflow.set_tracking_uri(before)


def test_a_missing_package_is_named():
    with pytest.raises(ImportError, match=r"writing to Tool needs its package: pip install 'gramscope\[tool\]'"):
        adapters._imported("gramscope_has_no_such_module", "Tool", "tool")
