"""Modular arithmetic, and a small transformer to learn it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gramscope.base.checks import check_choice, check_count, check_number
from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.base.rng import generator, seeded


@dataclass(frozen=True, repr=False)
class TokenTask(Result):
    """Training and test examples of tokens with integer labels."""

    x: Int[Tensor, "n token"]
    y: Int[Tensor, " n"]
    x_test: Int[Tensor, "m token"]
    y_test: Int[Tensor, " m"]
    vocabulary: int
    classes: int


def modular(p: int = 31, *, seed: int = 0, train: float = 0.5, operation: str = "add") -> TokenTask:
    """All pairs (a, b) modulo ``p`` as tokens ``a, b, =``, labelled ``a + b`` or ``a · b`` mod p (Power et al., 2022).

    A share ``train`` of the p² pairs, shuffled by ``seed``, is for training; the rest is held out.

    >>> task = modular(5, train=0.6)
    >>> task.x.shape, task.x_test.shape, bool(((task.x[:, 0] + task.x[:, 1]) % 5 == task.y).all())
    (torch.Size([15, 3]), torch.Size([10, 3]), True)
    """
    check_count(p, "p", 2)
    check_choice(operation, "operation", ("add", "multiply"))
    a, b = torch.meshgrid(torch.arange(p, device="cpu"), torch.arange(p, device="cpu"), indexing="ij")
    a, b = a.flatten(), b.flatten()
    x = torch.stack([a, b, torch.full_like(a, p)], dim=1)
    y = (a + b) % p if operation == "add" else a * b % p
    return shuffled_tokens(x, y, train, seed, p + 1, p)


def shuffled_tokens(
    x: Int[Tensor, "n token"], y: Int[Tensor, " n"], train: float, seed: int, vocabulary: int, classes: int
) -> TokenTask:
    """A share ``train`` of all examples, in an order drawn by ``seed``, for training; the rest is held out."""
    count = round(check_number(train, "train", above=0.0, below=1.0) * len(y))
    if not 0 < count < len(y):
        raise InputError(f"train must leave examples on both sides of {len(y)}, got {train}.")
    first, rest = torch.randperm(len(y), generator=generator(seed), device="cpu").split([count, len(y) - count])
    return TokenTask(x[first], y[first], x[rest], y[rest], vocabulary, classes)


class ModularTransformer(nn.Module):
    """One block of attention and one of units over three tokens; logits at the last token, without layer norm."""

    def __init__(self, vocabulary: int, classes: int, width: int, heads: int, hidden: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(tokens, width) / width**0.5)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, tokens: Int[Tensor, "n token"]) -> Float[Tensor, "n classes"]:
        stream = self.embedding(tokens) + self.position
        stream = stream + self.attention(stream, stream, stream, need_weights=False)[0]
        stream = stream + self.down(torch.relu(self.up(stream)))
        logits: Tensor = self.head(stream[:, -1])
        return logits


def modular_transformer(
    task: TokenTask, *, width: int = 32, heads: int = 4, hidden: int = 64, seed: int = 0
) -> ModularTransformer:
    """A transformer for the task, seeded without touching the global random stream.

    >>> task = modular(5)
    >>> modular_transformer(task, width=8, heads=2)(task.x[:2]).shape
    torch.Size([2, 5])
    """
    with seeded(seed):
        return ModularTransformer(task.vocabulary, task.classes, width, heads, hidden, task.x.shape[1])
