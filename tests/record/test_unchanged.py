"""Watching changes nothing: each way of training, with and without, bit by bit."""

import copy
import os
import random

import jaxtyping
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gramscope as gs

X = torch.randn(24, 1, 6, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(1))
STEPS = 5


@pytest.fixture(autouse=True)
def _as_users_run_it():
    # The runtime type checker of the test suite draws from Python's random stream; users run without it.
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def network() -> nn.Module:
    """Batch norm moves its buffers, dropout draws, ReLU overwrites."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 8),
        nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(36, 36), nn.Linear(36, 36), nn.Linear(36, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.relu(self.second(torch.relu(self.first(x.flatten(1))))))


def frozen() -> nn.Module:
    model = network()
    model[0].requires_grad_(False)
    return model


def batches():
    order = torch.randperm(24)  # the loop draws, too
    return order.split(8)


def plain(model, optimizer, scope, attached):
    for _ in range(STEPS):
        for some in batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X[some]), Y[some])
            loss.backward()
            optimizer.step()
            if scope is not None and not attached:
                scope.step(loss=loss)


def accumulating(model, optimizer, scope, attached):
    for _ in range(STEPS):
        optimizer.zero_grad()
        for some in batches():
            F.cross_entropy(model(X[some]), Y[some]).backward()
        optimizer.step()
        if scope is not None and not attached:
            scope.step()


def mixed_precision(model, optimizer, scope, attached):
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(STEPS):
        for some in batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(X[some]), Y[some])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if scope is not None and not attached:
                scope.step(loss=loss)


def in_one_autocast(model, optimizer, scope, attached):
    """The cache of one autocast around all serves the weights of the first step again and again: so it must stay."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain(model, optimizer, scope, attached)


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
}
RUNS = {
    "plain": (network, plain, "sgd", False),
    "attached": (network, plain, "adam", True),
    "accumulating": (network, accumulating, "adam", False),
    "accumulating, attached": (network, accumulating, "sgd", True),
    "mixed precision": (network, mixed_precision, "sgd", True),
    "in one autocast": (network, in_one_autocast, "sgd", False),
    "tied": (Tied, plain, "adam", False),
    "frozen": (frozen, plain, "sgd", True),
    "compiled": (lambda: torch.compile(network(), backend="eager"), plain, "sgd", False),
}


def state(model, optimizer):
    """All that training leaves behind."""
    return {
        "parameters": {n: p.detach().clone() for n, p in model.named_parameters()},
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "flags": [(n, p.requires_grad) for n, p in model.named_parameters()],
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "modes": [(n, m.training) for n, m in model.named_modules()],
        "hooks": [(n, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()],
        "optimiser": copy.deepcopy(optimizer.state_dict()),
        "streams": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),  # noqa: NPY002
        "settings": (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_float32_matmul_precision()),
    }


def assert_same(a, b, where="") -> None:
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (one, two) in enumerate(zip(a, b, strict=True)):
            assert_same(one, two, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), f"{where} differs"
    else:
        assert a == b, f"{where} differs"


def train(name, out):
    make, loop, optimiser, attached = RUNS[name]
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    model = make()
    optimizer = OPTIMISERS[optimiser]([p for p in model.parameters() if p.requires_grad])
    scope = None
    if out is not None:
        scope = gs.watch(model, probe=(X[:12], Y[:12]), out=out, every=2, on_error="raise", overhead=None)
        scope = scope.attach(optimizer) if attached else scope.use(optimizer)
    model.train()
    loop(model, optimizer, scope, attached)
    if scope is not None:
        scope.close()
    return state(model, optimizer), scope


@pytest.mark.parametrize("name", RUNS)
def test_training_is_the_same_to_the_last_bit(name, tmp_path):
    without, _ = train(name, None)
    watched, scope = train(name, tmp_path / "run")
    assert_same(without, watched)
    expected = STEPS if "accumulating" in name else 3 * STEPS
    assert scope.count == expected, "steps are optimiser steps, not batches"
    run = gs.open_run(tmp_path / "run")
    steps = [step for step in run.scalars().index if step % 2 == 0]
    assert steps == list(range(0, expected + 1, 2))
    assert set(run.scalars().index) - set(steps) <= {expected}, "the last loss is kept, measured or not"
    assert not any(record["failures"] for record in scope.records)
    columns = set(run.scalars().columns)
    assert {"loss/probe", "accuracy/probe", "kernel/drift", "richness", "step/error"} <= columns


def test_the_check_sees_a_change():
    """The comparison itself, fed a run that was disturbed."""
    without, _ = train("plain", None)
    for key in ("parameters", "buffers"):
        name = next(iter(without[key]))
        other = copy.deepcopy(without)
        other[key][name] = other[key][name] + 1e-7
        with pytest.raises(AssertionError, match="differs"):
            assert_same(without, other)


def test_data_parallel(tmp_path):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        def run(out):
            torch.manual_seed(3)
            model = nn.parallel.DistributedDataParallel(network())
            optimizer = OPTIMISERS["sgd"](model.parameters())
            if out is not None:
                scope = gs.watch(
                    model, probe=(X[:12], Y[:12]), out=out, every=5, on_error="raise", overhead=None
                ).attach(optimizer)
            plain(model, optimizer, None, True)
            if out is not None:
                scope.close()
                assert all(not name.startswith("module.") for name in scope.records[-1]["scalars"])
                assert "share/0" in scope.records[-1]["scalars"]
            return state(model, optimizer)

        assert_same(run(None), run(tmp_path / "run"))
    finally:
        dist.destroy_process_group()


class Language(nn.Module):
    """A small GPT: the table of tokens is also the last layer, and dropout draws."""

    def __init__(self, vocabulary: int = 40, width: int = 16) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocabulary, width), nn.Embedding(12, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.2, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.table.weight

    def forward(self, input_ids):
        x = self.table(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        return self.head(self.block(x, src_mask=mask, is_causal=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attached", [True, False])
def test_a_language_model_trains_the_same(tmp_path, dtype, attached):
    """A loop as of nanoGPT: accumulation, autocast, clipped gradients, a schedule of the learning rate."""
    ids = torch.randint(0, 40, (8, 13), generator=torch.Generator().manual_seed(0))

    def run(out):
        torch.manual_seed(3)
        model = Language()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        scope = None
        if out is not None:
            probe = (ids[:3, :-1], ids[:3, 1:])
            scope = gs.watch(model, probe, out, every=2, on_error="raise", overhead=None)
            scope = scope.attach(optimizer) if attached else scope.use(optimizer)
        for step in range(6):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
            for some in (slice(0, 4), slice(4, 8)):
                with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                    logits = model(ids[some, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1), ids[some, 1:].flatten()) / 2
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step < 5)  # the last leaves zeros
            if scope is not None and not attached:
                scope.step(loss=loss)
        if scope is not None:
            scope.close()
            seen = gs.open_run(out).scalars()
            wanted = ["loss/probe", "share/table", "kernel/drift", "richness"]
            assert list(seen.index) == [0, 2, 4, 6]
            assert seen[wanted].notna().all().all()
            assert seen["step/error"].notna().sum() == 3
        return state(model, optimizer)

    assert_same(run(None), run(tmp_path / "run"))
