"""Linear interpolation in generative models, arXiv:2605.06258: a VAE on digits and a flow on a ring in the plane.

``path_*``: path linearity of decoded latent paths (1: a straight line at even speed), in the layers of the decoder.
``TL_*``: target linearity of the decoder's output in each layer. ``middle_*``: distance of the middle of a path to the
nearest training example. ``off_*``: largest distance of a path from the ring.
"""

import math
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

import gramscope as gs

TITLE = "Straight paths in latent space (2605.06258)"
QUESTION = "Does a trained decoder turn straight latent paths into paths that stay on the data, layer by layer?"
SEEDS = 5
LATENT, PAIRS, STEPS = 8, 100, 11


def cases(quick: bool) -> list[dict[str, str | int | float | bool]]:
    return [{"model": model} for model in ("vae", "flow")]


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


def decoder_numbers(decoder: nn.Module, ends: tuple[Tensor, Tensor], prior: Tensor, when: str) -> dict[str, float]:
    paths = gs.measures.interpolation_linearity(decoder, *ends, steps=STEPS).mean()
    made = decoder(prior)
    layers = {"latent": prior, "layer_1": decoder[:2](prior), "layer_2": decoder[:4](prior)}
    found = {
        f"path_{layer}_{when}": paths[key]
        for layer, key in (("layer_1", "1"), ("layer_2", "3"), ("output", "(output)"))
    }
    for layer, h in layers.items():
        found[f"TL_{layer}_{when}"] = float(gs.measures.target_linearity(h, made, center=True))
    return found


def vae(seed: int, epochs: int) -> dict[str, float]:
    task, rng = gs.tasks.digits(seed), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, untrained = VAE(), VAE()
    fit(model, task.x, epochs, rng)
    with torch.no_grad():
        a, b = task.x_test[:PAIRS], task.x_test[PAIRS : 2 * PAIRS]
        ends, prior = (model.mean(a), model.mean(b)), torch.randn(400, LATENT, generator=rng)
        found = decoder_numbers(untrained.decoder, ends, prior, "start")
        found |= decoder_numbers(model.decoder, ends, prior, "end")
        straight = gs.measures.interpolate(a, b, STEPS)
        codes = model.mean(straight.flatten(0, 1)).reshape(PAIRS, STEPS, -1)
        decoded = model.decoder(gs.measures.interpolate(*ends, STEPS).flatten(0, 1)).reshape(PAIRS, STEPS, -1)
        found["path_codes_of_pixel_paths"] = float(gs.measures.path_linearity(codes).mean())
        middle = STEPS // 2
        for kind, x in (("latent", decoded[:, middle]), ("pixels", straight[:, middle]), ("test_images", a)):
            found[f"middle_{kind}"] = float(torch.cdist(x, task.x).min(1).values.mean())
    return found


def flow(seed: int, epochs: int) -> dict[str, float]:
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Flow()
    angle = 2 * math.pi * torch.rand(2000, 1, generator=rng)
    ring = torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(2000, 2, generator=rng)
    fit(model, ring, epochs, rng)
    with torch.no_grad():
        a, b = ring[:PAIRS], ring[PAIRS : 2 * PAIRS]
        ends = model.inverse(a), model.inverse(b)
        paths = gs.measures.interpolation_linearity(model, *ends, steps=STEPS, layers="")
        prior = torch.randn(1000, 2, generator=rng)
        off = {"latent": paths.outputs, "data": gs.measures.interpolate(a, b, STEPS)}
        return {
            "path_output_end": paths.mean()["(output)"],
            "TL_latent_end": float(gs.measures.target_linearity(prior, model(prior), center=True)),
            "reconstruction_error": float((model(ends[0]) - a).norm(dim=1).mean()),
            **{f"off_{kind}": float((x.norm(dim=-1) - 1).abs().amax(1).mean()) for kind, x in off.items()},
            "off_samples": float((model(prior).norm(dim=-1) - 1).abs().mean()),
        }


def run(
    case: dict[str, str | int | float | bool], seed: int, *, quick: bool, device: str, out: Path
) -> dict[str, float]:
    return vae(seed, 10 if quick else 60) if case["model"] == "vae" else flow(seed, 10 if quick else 150)


def figure(table: pd.DataFrame, path: Path) -> None:
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(1, 3, figsize=(11, 3.3), layout="constrained")
    rows, ring = table[table["model"] == "vae"], table[table["model"] == "flow"]
    for kind, axis, layers in (
        ("path", axes[0], ("layer_1", "layer_2", "output")),
        ("TL", axes[1], ("latent", "layer_1", "layer_2")),
    ):
        for when in ("start", "end"):
            chosen = rows[[f"{kind}_{layer}_{when}" for layer in layers]]
            label = "untrained" if when == "start" else "trained"
            axis.errorbar(range(3), chosen.mean(), chosen.std().fillna(0), marker="o", label=label)
        axis.set_xticks(range(3), layers)
        axis.legend(frameon=False)
    axes[0].set(title="VAE: straightness of decoded latent paths")
    axes[1].set(title="VAE: target linearity of the output")
    names = ["off_latent", "off_data", "off_samples"]
    axes[2].bar(range(3), ring[names].mean(), yerr=ring[names].std().fillna(0), color="#2f5fb2", width=0.6)
    axes[2].set_xticks(range(3), ["latent paths", "straight in data", "samples"])
    axes[2].set(title="flow: distance from the ring")
    picture.savefig(path, dpi=110)
    pyplot.close(picture)
