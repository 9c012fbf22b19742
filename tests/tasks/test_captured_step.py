"""A captured step trains as a plain one does; without a GPU, what is called when."""

import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from gramscope.base.errors import InputError
from gramscope.base.user_warnings import SlowPathWarning
from gramscope.tasks import CapturedStep

EPOCHS, LR = 6, {0: 0.1, 3: 0.02}  # by epoch: from 3 on another one


def trained(device: str, captured: bool) -> tuple[nn.Module, int]:
    """A network with batch norm after six epochs of batches of 8, 8 and 4, and how many graphs there are at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)).to(device)
    x, y = torch.randn(20, 5).to(device), torch.randn(20, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR[0], momentum=0.9, weight_decay=1e-2)

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(x[rows]) - y[rows]).square().mean().backward()
        optimizer.step()

    steps = CapturedStep(step, plain=2)
    for epoch in range(EPOCHS):
        optimizer.param_groups[0]["lr"] = LR.get(epoch, optimizer.param_groups[0]["lr"])
        if epoch in LR:
            steps.forget()
        for rows in torch.randperm(20).to(device).split(8):
            (steps if captured else step)(rows)
    return model, len(steps.graphs)


def assert_same_state(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, msg=name, **tolerance)


def test_on_a_cpu_it_is_the_step_itself():
    captured, graphs = trained("cpu", captured=True)
    assert graphs == 0
    assert_same_state(trained("cpu", captured=False)[0], captured, rtol=0, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_graphs_train_the_same_network():
    captured, graphs = trained("cuda", captured=True)
    assert graphs == 2  # one for 8 rows, one for 4
    assert_same_state(trained("cuda", captured=False)[0], captured, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_step_that_cannot_be_captured_is_called_as_it_is():
    """In a process of its own, since a failed capture may leave CUDA in disorder."""
    script = """
import torch, gramscope as gs
total = torch.zeros(1, device="cuda")
step = gs.tasks.CapturedStep(lambda rows: total.add_(float(rows.sum())), plain=1)  # reads a number back to the CPU
for _ in range(4):
    step(torch.arange(3, device="cuda"))
print(total.item())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "12.0", done.stderr
    assert "SlowPathWarning" in done.stderr


# Which call does what, with a stand-in for CUDA that notes what is asked of it. --------------------------------------


class OnGPU(torch.Tensor):
    is_cuda = True


@pytest.fixture
def told(monkeypatch):
    told: list[str] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            pass

    class Graph:
        def replay(self) -> None:
            told.append("replay")

    @contextmanager
    def quiet(stream: object):
        yield

    @contextmanager
    def capture(graph: object, stream: object):
        told.append("capture")
        yield

    for name, stand_in in {
        "Stream": Stream, "CUDAGraph": Graph, "graph": capture, "stream": quiet, "current_stream": Stream,
        "synchronize": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return told


def rows(count: int) -> torch.Tensor:
    return torch.arange(count).as_subclass(OnGPU)


def test_each_number_of_rows_is_plain_first_then_captured_once_then_replayed(told):
    step = CapturedStep(lambda rows: told.append(f"step {len(rows)}"), plain=2)
    for count in (8, 8, 4, 8, 8):
        step(rows(count))
    assert told == ["step 8", "step 8", "step 4", "capture", "step 8", "replay", "replay"]
    told.clear()
    step.forget()
    for count in (8, 4, 4):
        step(rows(count))
    assert told == ["capture", "step 8", "replay", "step 4", "capture", "step 4", "replay"]


def test_a_failed_capture_is_said_once_and_every_step_is_still_made(told):
    made: list[int] = []

    def step(rows: torch.Tensor) -> None:
        if told[-1:] == ["capture"]:
            told.append("failed")
            raise RuntimeError("operation not permitted when stream is capturing")
        made.append(len(rows))

    steps = CapturedStep(step, plain=1)
    steps(rows(8))
    with pytest.warns(SlowPathWarning, match="not permitted"):
        steps(rows(8))
    steps(rows(8))
    assert made == [8, 8, 8]
    assert told == ["capture", "failed"]


def test_plain_calls_must_be_counted():
    with pytest.raises(InputError, match="plain"):
        CapturedStep(print, plain=0)
