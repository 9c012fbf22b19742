"""The spectrum of NTK_S and self-referential bias while a recurrent network learns memory-pro.

python docs/gallery/propagators.py            writes docs/images/propagators.svg
"""

import copy
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import nn

from gramscope.linalg import eigenvalues_top
from gramscope.propagators import GlobalNTK, participation_ratio, self_referential_bias
from gramscope.tasks import SequenceTask, memory_pro

STEPS, EVERY, SHOWN = 600, 50, (0, 100, 250, 600)


def train(task: SequenceTask, width: int = 64) -> list[tuple[int, float, nn.RNN]]:
    """Snapshots (step, loss, copy of the recurrent layer) of one run."""
    torch.manual_seed(0)
    rnn, readout = nn.RNN(3, width, batch_first=True), nn.Linear(width, 3)
    optimiser = torch.optim.Adam([*rnn.parameters(), *readout.parameters()], 7e-4)
    found = []
    for step in range(STEPS + 1):
        loss = task.loss(readout(rnn(task.x)[0]))
        if step % EVERY == 0:
            found.append((step, float(loss.detach()), copy.deepcopy(rnn)))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*rnn.parameters(), *readout.parameters()], 0.3)
        optimiser.step()
    return found


def main() -> None:
    task = memory_pro(10, fixation=4, stimulus=6, delay=8, response=6)
    snapshots = train(task)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10.5, 3.2), layout="constrained")
    colours = plt.get_cmap("viridis")
    for step, _, rnn in snapshots:
        if step not in SHOWN:
            continue
        # The tolerance is relative to the largest eigenvalue, and the fortieth is a ten-thousandth of it.
        top = eigenvalues_top(GlobalNTK(rnn, task.x, precision="float64").operator, 40, tol=1e-6)
        assert top.all_converged, "the spectrum has not converged"
        colour = colours(0.9 * SHOWN.index(step) / (len(SHOWN) - 1))
        left.semilogy(range(1, 41), top.values, color=colour, label=f"step {step}", lw=1.5)
    left.set(xlabel="index", ylabel="eigenvalue", title="Spectrum of NTK$_S$ = P K P*")
    left.legend(frameon=False, fontsize=8)

    steps = [step for step, _, _ in snapshots]
    ranks = [participation_ratio(GlobalNTK(rnn, task.x).operator, products=60) for _, _, rnn in snapshots]
    middle.errorbar(steps, [r.value for r in ranks], [r.interval()[1] - r.value for r in ranks], color="C0", lw=1.5)
    middle.set(xlabel="training step", ylabel="participation ratio", title="Participation ratio and loss")
    middle.set_ylim(bottom=0)
    twin = middle.twinx()
    twin.semilogy(steps, [loss for _, loss, _ in snapshots], color="0.55", ls="--", lw=1.2)
    twin.set_ylabel("loss (dashed)", color="0.45")

    biases = [self_referential_bias(GlobalNTK(rnn, task.x), k=3, targets=task.y) for _, _, rnn in snapshots]
    right.semilogy(steps, [float(b.activity[0]) for b in biases], label="own activity, mode 1", lw=1.5)
    right.semilogy(steps, [float(b.activity[1]) for b in biases], "C0:", label="own activity, mode 2", lw=1.5)
    right.semilogy(steps, [float(b.target.max()) for b in biases], "C1", label="targets, best mode", lw=1.5)
    right.semilogy(steps, [float(b.target.min()) for b in biases], "C1:", label="targets, worst mode", lw=1.5)
    right.semilogy(steps, [float(b.random.mean()) for b in biases], "0.55", label="random modes", lw=1.5)
    right.set(xlabel="training step", ylabel="Rayleigh quotient", title="Self-referential bias")
    right.legend(frameon=False, fontsize=7)
    for axis in (left, middle, right):
        axis.spines[["top"]].set_visible(False)
        axis.title.set_fontsize(10)
    plt.rcParams["svg.fonttype"] = "none"
    picture = Path(__file__).parents[1] / "images" / "propagators.svg"
    plt.rcParams["svg.hashsalt"] = "gramscope"
    figure.savefig(picture, metadata={"Date": None})
    if len(sys.argv) > 1:
        figure.savefig(sys.argv[1], dpi=110)
    for step, loss, _ in snapshots:
        place = steps.index(step)
        own, target = biases[place].activity, biases[place].target
        modes = [round(float(v), 2) for v in (*own, *target, biases[place].random.mean())]
        print(step, round(loss, 4), ranks[place], modes)


if __name__ == "__main__":
    main()
