"""A network on digits beside its linearisations at four times: when does a fixed kernel explain the rest of training?

Run from the repository root: python docs/gallery/linearization.py. Prints a table; two minutes on one core.
"""

import torch
from torch import Tensor, nn

from gramscope.measures import layer_target_linearity, moving_target
from gramscope.tasks import digits, mlp

STEPS, STARTS, RATE = 1500, (0, 50, 200, 800), 0.1


def loss(f: Tensor, y: Tensor) -> Tensor:
    """Half the squared error to one-hot targets, summed over classes."""
    return 0.5 * (f - nn.functional.one_hot(y, 10)).square().sum(1).mean()


def linearity(model: nn.Module, x: Tensor, y: Tensor) -> str:
    found = layer_target_linearity(model, x, y, ["1", "3"], center=True)
    return ", ".join(f"{found[name]:.3f}" for name in ("1", "3"))


def at_step(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """The network after so many steps, for its features."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model


def main() -> None:
    torch.set_num_threads(1)
    task = digits()
    x, y, test = task.x[:150], task.y[:150], (task.x_test[:200], task.y_test[:200])
    found = moving_target(mlp((64, 32, 32, 10)), x, y, loss, lr=RATE, steps=STEPS, starts=STARTS, test=test)
    assert found.test_loss is not None
    print("| run | train loss | test loss | distance to the network's outputs | target linearity (test), layers 1, 2 |")
    print("|---|---|---|---|---|")

    def accuracy(outputs: Tensor) -> float:
        return float((outputs[len(x) :].argmax(1) == test[1]).double().mean())

    for start in STARTS:
        run = found.runs[start]
        assert run.test_loss is not None
        kept = linearity(at_step(mlp((64, 32, 32, 10)), x, y, start), *test)
        numbers = f"{run.train_loss[-1]:.4f} | {run.test_loss[-1]:.4f} ({100 * accuracy(run.outputs):.1f} %)"
        print(f"| linearised at step {start} | {numbers} | {found.gap(start):.3f} | {kept} |")
    moved = linearity(at_step(mlp((64, 32, 32, 10)), x, y, STEPS), *test)
    numbers = f"{found.train_loss[-1]:.4f} | {found.test_loss[-1]:.4f} ({100 * accuracy(found.outputs):.1f} %)"
    print(f"| the network, {STEPS} steps | {numbers} | 0 | {moved} |")


if __name__ == "__main__":
    main()
