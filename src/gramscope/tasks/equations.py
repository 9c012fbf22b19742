"""Equations modulo a prime as four tokens, and the causal transformer that groks them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gramscope.base.checks import check_choice, check_count, check_counts
from gramscope.base.errors import InputError
from gramscope.base.rng import seeded
from gramscope.tasks.modular_arithmetic import TokenTask, shuffled_tokens


def modular_equations(p: int = 97, *, operation: str = "divide", train: float = 0.5, seed: int = 0) -> TokenTask:
    """Equations ``a ∘ b =`` modulo the prime ``p`` with b ≠ 0, as four tokens, labelled by the result.

    ``operation`` is "divide" (``a b⁻¹``), "add" or "multiply". There are ``p (p - 1)`` equations; half of them, for
    p = 97, are the 4,656 training examples of arXiv:2410.04264, table 9. What the paper calls division is
    multiplication. Tokens 0 to p - 1 are the numbers, p is ∘ and p + 1 is =.

    Reference: Power et al. 2022 (arXiv:2201.02177); arXiv:2410.04264, appendix H.3.

    >>> task = modular_equations(5, operation="divide")
    >>> a, b = task.x[:, 0], task.x[:, 2]
    >>> bool((task.y * b % 5 == a).all()), len(task.x) + len(task.x_test)
    (True, 20)
    """
    p = check_count(p, "p", 2)
    if any(p % d == 0 for d in range(2, int(p**0.5) + 1)):
        raise InputError(f"p must be a prime, so that every b but 0 has an inverse, got {p}.")
    check_choice(operation, "operation", ("divide", "add", "multiply"))
    a, b = (grid.flatten() for grid in torch.meshgrid(
        torch.arange(p, device="cpu"), torch.arange(1, p, device="cpu"), indexing="ij"
    ))  # fmt: skip
    inverse = torch.tensor([0] + [pow(value, -1, p) for value in range(1, p)], device="cpu")
    y = {"add": a + b, "multiply": a * b, "divide": a * inverse[b]}[operation] % p
    x = torch.stack([a, torch.full_like(a, p), b, torch.full_like(a, p + 1)], dim=1)
    return shuffled_tokens(x, y, train, seed, p + 2, p)


class CausalBlock(nn.Module):
    """Attention to earlier tokens and a layer of units, each after a layer norm and added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.units = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, stream: Float[Tensor, "n token d"]) -> Float[Tensor, "n token d"]:
        count = stream.shape[1]
        later = torch.ones(count, count, dtype=torch.bool, device=stream.device).triu(1)
        x = self.norm_1(stream)
        stream = stream + self.attention(x, x, x, attn_mask=later, need_weights=False)[0]
        return stream + self.units(self.norm_2(stream))


class CausalTransformer(nn.Module):
    """A decoder that answers at its last token."""

    def __init__(self, vocabulary: int, length: int, classes: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(CausalBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes, bias=False)

    def forward(self, tokens: Int[Tensor, "n token"]) -> Float[Tensor, "n classes"]:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        stream = self.blocks(self.tokens(tokens) + self.positions(places))
        logits: Tensor = self.head(self.norm(stream[:, -1]))
        return logits


def causal_transformer(
    task: TokenTask, *, width: int = 128, heads: int = 4, layers: int = 2, seed: int = 0
) -> CausalTransformer:
    """A causal transformer of two layers for the equations of :func:`modular_equations`.

    Reference: Power et al. 2022 (arXiv:2201.02177), appendix A.1.2: two layers, width 128, four heads.

    >>> task = modular_equations(5)
    >>> causal_transformer(task, width=8, heads=2)(task.x[:3]).shape
    torch.Size([3, 5])
    """
    check_counts(1, width=width, heads=heads, layers=layers)
    if width % heads:
        raise InputError(f"width must be a multiple of the {heads} heads, got {width}.")
    with seeded(seed):
        return CausalTransformer(task.vocabulary, task.x.shape[1], task.classes, width, heads, layers)
