"""What a target-linearity regulariser does to accuracy: digits with many and few examples, and 10,000 of MNIST.

Run from the repository root: python docs/gallery/linearity_penalty.py. Prints a table; three minutes on one core. MNIST
is looked for in $GRAMSCOPE_DATA and ../shared/data, and is left out where neither has it.
"""

import torch
from torch.nn.functional import cross_entropy

from gramscope.measures import LinearityRegularizer, layer_target_linearity
from gramscope.tasks import Task, digits, mlp, mnist

STRENGTHS = (0.0, 0.1, 1.0, 10.0)
SEEDS = (0, 1, 2)


def trained(task: Task, widths: tuple[int, ...], strength: float, epochs: int, seed: int) -> tuple[float, float, float]:
    """Test accuracy, and target linearity (with an offset) of the two hidden layers on 500 test examples."""
    model, layers = mlp(widths, seed=seed), ["1", "3"]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rng = torch.Generator().manual_seed(seed)
    with LinearityRegularizer(model, layers, targets=10) as regularizer:
        for _ in range(epochs):
            for rows in torch.randperm(len(task.x), generator=rng).split(64):
                optimizer.zero_grad()
                loss = cross_entropy(model(task.x[rows]), task.y[rows])
                if strength:
                    loss = loss + strength * regularizer(task.y[rows])
                loss.backward()
                optimizer.step()
    with torch.no_grad():
        accuracy = float((model(task.x_test).argmax(1) == task.y_test).double().mean())
    found = layer_target_linearity(model, task.x_test[:500], task.y_test[:500], layers, center=True)
    return accuracy, float(found["1"]), float(found["3"])


def few(task: Task, count: int) -> Task:
    return Task(task.x[:count], task.y[:count], task.x_test, task.y_test)


def main() -> None:
    torch.set_num_threads(1)
    cases = [
        ("digits, 1,400 examples", digits(), (64, 64, 64, 10), 30),
        ("digits, 100 examples", few(digits(), 100), (64, 64, 64, 10), 200),
    ]
    try:
        cases.append(("MNIST, 10,000 examples", mnist(train=10_000), (784, 128, 128, 10), 4))
    except FileNotFoundError as error:
        print(f"MNIST is left out: {error}")
    print("| data | strength | test accuracy | target linearity, layers 1 and 2 |\n|---|---|---|---|")
    for name, task, widths, epochs in cases:
        for strength in STRENGTHS:
            runs = torch.tensor([trained(task, widths, strength, epochs, seed) for seed in SEEDS])
            mean, std = runs.mean(0).tolist(), runs.std(0).tolist()
            accuracy = f"{100 * mean[0]:.2f} ± {100 * std[0]:.2f} %"
            print(f"| {name} | {strength:g} | {accuracy} | {mean[1]:.3f}, {mean[2]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
