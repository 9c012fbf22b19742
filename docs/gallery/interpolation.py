"""Interpolation in latent space against data space: a VAE on digits, and a flow on a ring in two dimensions.

Run from the repository root: python docs/gallery/interpolation.py. Prints the numbers of docs/target-linearity.md; two
minutes on one core.
"""

import math

import torch
from torch import Tensor, nn

from gramscope.measures import interpolate, interpolation_linearity, path_linearity, target_linearity
from gramscope.tasks import digits

LATENT, EPOCHS, PAIRS, STEPS = 8, 60, 100, 11


class VAE(nn.Module):
    """Encoder to a mean and a log variance, decoder back; Gaussian noise of one size on the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def mean(self, x: Tensor) -> Tensor:
        return self.encoder(x)[:, :LATENT]

    def loss(self, x: Tensor, rng: torch.Generator) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.exp(log_variance / 2) * torch.randn(mean.shape, generator=rng)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return (0.5 * (self.decoder(z) - x).square().sum(1) / 0.3 + divergence).mean()


class Flow(nn.Module):
    """A velocity field v(x, t) by flow matching (arXiv:2210.02747); forward integrates it from noise to data."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layers = [nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)]
        self.velocity = nn.Sequential(*layers)

    def at(self, x: Tensor, t: Tensor) -> Tensor:
        return self.velocity(torch.cat([x, t], 1))

    def loss(self, x: Tensor, rng: torch.Generator) -> Tensor:
        noise, t = torch.randn(x.shape, generator=rng), torch.rand(len(x), 1, generator=rng)
        return (self.at((1 - t) * noise + t * x, t) - (x - noise)).square().mean()

    def forward(self, z: Tensor, steps: int = 50) -> Tensor:
        for step in range(steps):
            z = z + self.at(z, torch.full((len(z), 1), step / steps)) / steps
        return z

    def inverse(self, x: Tensor, steps: int = 50) -> Tensor:
        for step in range(steps, 0, -1):
            x = x - self.at(x, torch.full((len(x), 1), step / steps)) / steps
        return x


def fit(model: VAE | Flow, x: Tensor, epochs: int, rng: torch.Generator) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=rng).split(128):
            optimizer.zero_grad()
            model.loss(x[rows], rng).backward()
            optimizer.step()


def show(name: str, values: dict[str, float]) -> None:
    print(f"{name}: " + ", ".join(f"{layer} {value:.3f}" for layer, value in values.items()), flush=True)


def vae() -> None:
    torch.manual_seed(0)
    task, rng, model = digits(), torch.Generator().manual_seed(0), VAE()
    untrained = VAE()
    fit(model, task.x, EPOCHS, rng)
    with torch.no_grad():
        a, b = task.x_test[:PAIRS], task.x_test[PAIRS : 2 * PAIRS]
        ends, prior = (model.mean(a), model.mean(b)), torch.randn(400, LATENT, generator=rng)
        for name, decoder in (("untrained", untrained.decoder), ("trained", model.decoder)):
            show(f"VAE, {name}: path linearity", interpolation_linearity(decoder, *ends, steps=STEPS).mean())
            made = decoder(prior)
            tl = {"latent": prior, "layer 1": decoder[:2](prior), "layer 2": decoder[:4](prior)}
            show(f"VAE, {name}: target linearity of the output", {
                layer: float(target_linearity(h, made, center=True)) for layer, h in tl.items()
            })  # fmt: skip
        straight = interpolate(a, b, STEPS)
        codes = model.mean(straight.flatten(0, 1)).reshape(PAIRS, STEPS, -1)
        decoded = model.decoder(interpolate(*ends, STEPS).flatten(0, 1)).reshape(PAIRS, STEPS, -1)
        show("VAE, path in pixels", {"path linearity of its codes": float(path_linearity(codes).mean())})
        middle = STEPS // 2
        near = {"latent": decoded[:, middle], "pixels": straight[:, middle], "test images": a}
        distance = {kind: float(torch.cdist(x, task.x).min(1).values.mean()) for kind, x in near.items()}
        show("VAE, distance of the middle to the nearest training image", distance)


def flow() -> None:
    torch.manual_seed(0)
    rng, model = torch.Generator().manual_seed(0), Flow()
    angle = 2 * math.pi * torch.rand(2000, 1, generator=rng)
    ring = torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(2000, 2, generator=rng)
    fit(model, ring, 150, rng)
    with torch.no_grad():
        a, b = ring[:PAIRS], ring[PAIRS : 2 * PAIRS]
        ends = model.inverse(a), model.inverse(b)
        found = interpolation_linearity(model, *ends, steps=STEPS, layers="")
        prior = torch.randn(1000, 2, generator=rng)
        show("flow", {
            "path linearity of decoded latent paths": found.mean()["(output)"],
            "target linearity of the decoder": float(target_linearity(prior, model(prior), center=True)),
            "reconstruction error": float((model(ends[0]) - a).norm(dim=1).mean()),
        })  # fmt: skip
        straight = interpolate(a, b, STEPS)
        paths = {"latent": found.outputs, "data space": straight, "samples": model(prior)[:, None]}
        off = {kind: float((x.norm(dim=-1) - 1).abs().mean()) for kind, x in paths.items()}
        show("flow, distance from the ring", off)
        show("flow, farthest point of each path", {
            kind: float((x.norm(dim=-1) - 1).abs().amax(1).mean()) for kind, x in list(paths.items())[:2]
        })  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    vae()
    flow()


if __name__ == "__main__":
    main()
