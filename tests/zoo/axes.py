"""Models that move, fold, split, reorder or route the example axis, and models that overwrite tensors."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from zoo.case import Call, normal, registry, several, weight

CASES, case = registry()


def mlp(d_in=4, d_out=2, hidden=4):
    return nn.Sequential(nn.Linear(d_in, hidden), nn.Tanh(), nn.Linear(hidden, d_out))


# --- folded axes


@case(normal(2, 4))
def flattened_example_major():
    return Call(lambda m, x: m.net(x.reshape(-1, 4)).view(*x.shape[:2], 2), net=mlp())


@case(normal(2, 4), fallback_ok=True)
def flattened_token_major():
    """(T * n, d) inside: row t * n + i belongs to example i."""
    return Call(
        lambda m, x: m.net(x.transpose(0, 1).reshape(-1, 4)).view(x.shape[1], x.shape[0], 2).transpose(0, 1),
        net=mlp(),
    )


@case(normal(3, 4), n=3, n2=3, fallback_ok=True)
def flattened_token_major_square():
    return Call(lambda m, x: m.net(x.transpose(0, 1).reshape(9, 4)).view(3, 3, 2).transpose(0, 1), net=mlp())


@case(normal(3, 4), n=3, n2=3)
def tokens_first_square():
    """(T, n, d) inside with T = n."""
    return Call(lambda m, x: m.net(x.transpose(0, 1)).transpose(0, 1), net=mlp())


@case(normal(3, 4), n=3, n2=3, fallback_ok=True)
def tokens_first_square_with_norm_and_mixing():
    def run(m, x):
        x = m.norm(m.embed(x.transpose(0, 1)))  # (T, n, d)
        return torch.einsum("st,tnd->snd", m.mix, torch.tanh(x)).sum(0)

    return Call(run, embed=nn.Linear(4, 3), norm=nn.LayerNorm(3), mix=weight(3, 3))


@case(normal(3, 4), n=3, n2=3, fallback_ok=True)
def mixer_over_tokens():
    """The Linear acts on the token axis, on (n, d, T)."""
    return Call(
        lambda m, x: m.channels(torch.tanh(m.tokens(x.transpose(1, 2)).transpose(1, 2))),
        tokens=nn.Linear(3, 3),
        channels=nn.Linear(4, 1),
    )


@case(normal(4, 4, 1), fallback_ok=True)
def windows_in_the_batch():
    """Swin: (n * windows, tokens, d) inside, example major."""

    def run(m, x):
        n = len(x)
        w = x.view(n, 2, 2, 2, 2, 1).permute(0, 1, 3, 2, 4, 5).reshape(n * 4, 4, 1)
        w = m.attend(*[m.embed(w)] * 3, need_weights=False)[0]
        return w.view(n, 2, 2, 2, 2, 2).permute(0, 1, 3, 2, 4, 5).reshape(n, 16, 2).amax(1)

    return Call(run, embed=nn.Linear(1, 2), attend=nn.MultiheadAttention(2, 1, batch_first=True))


@case(normal(2, 1, 3, 3), fallback_ok=True)
def frames_in_the_batch():
    """Video: the convolution sees (n * frames, channels, height, width)."""

    def run(m, x):
        n, frames = x.shape[:2]
        return m.rnn(m.conv(x.flatten(0, 1)).tanh().flatten(1).view(n, frames, -1))[0][:, -1]

    return Call(run, conv=nn.Conv2d(1, 2, 2), rnn=nn.GRU(8, 2, batch_first=True))


@case(normal(2, 1, 3, 3), fallback_ok=True)
def frames_in_the_batch_frame_major():
    def run(m, x):
        n, frames = x.shape[:2]
        return m.conv(x.transpose(0, 1).flatten(0, 1)).tanh().view(frames, n, 2, 2, 2).prod(0).flatten(1)

    return Call(run, conv=nn.Conv2d(1, 2, 2))


@case(normal(2, 4), fallback_ok=True)
def heads_in_the_batch():
    """(n * heads, T, d / heads) inside, with a Linear per head slot."""
    return Call(
        lambda m, x: m.out(
            m.head(m.embed(x).view(-1, 2, 2, 2).transpose(1, 2).reshape(-1, 2, 2))
            .tanh()
            .view(-1, 2, 2, 2)
            .flatten(2)
            .sum(1)
        ),
        embed=nn.Linear(4, 4),
        head=nn.Linear(2, 2),
        out=nn.Linear(4, 2),
    )


@case(normal(4), n=4, n2=2, fallback_ok=True)
def micro_batches():
    """The batch in chunks of two, one call each."""
    return Call(lambda m, x: torch.cat([m.net(part) for part in x.split(2)]), net=mlp())


@case(normal(4), fallback_ok=True)
def one_call_an_example():
    """The layer sees (d,), once for every example."""
    return Call(lambda m, x: torch.stack([m.net(row) for row in x]), net=mlp())


@case(normal(3, 4), n=3, n2=3, fallback_ok=True)
def one_call_an_example_as_many_tokens_as_examples():
    """The layer sees (T, d), once for every example, and T = n: the rows look like examples."""
    return Call(lambda m, x: torch.stack([m.net(row).sum(0) for row in x]), net=mlp())


@case(normal(4), fallback_ok=True)
def batch_reversed_inside():
    return Call(lambda m, x: m.net(x.flip(0)).flip(0), net=mlp())


@case(normal(4), fallback_ok=True)
def batch_sorted_inside():
    def run(m, x):
        order = x[:, 0].argsort()
        return m.net(x[order])[order.argsort()]

    return Call(run, net=mlp())


@case(normal(4), fallback_ok=True)
def batch_padded_inside():
    """An extra row of zeros passes every layer and is cut off at the end."""
    return Call(lambda m, x: m.net(F.pad(x, (0, 0, 1, 0)))[1:], net=mlp())


@case(normal(4), fallback_ok=True)
def vmap_inside():
    return Call(lambda m, x: torch.vmap(lambda row: torch.tanh(m.W @ row) + m.b)(x), W=weight(3, 4), b=weight(3))


# --- routed examples


class Experts(nn.Module):
    """Every token goes to one of two experts by a boolean mask, and comes back by `index_put`."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(3, 2)
        self.experts = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x):
        chance = self.router(x).softmax(-1)
        chosen, result = chance.argmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            result[mask] = torch.tanh(expert(x[mask])) * chance[mask][:, i : i + 1]
        return result


@case(normal(3, 3), n=3, fallback_ok=True)
def experts_by_boolean_mask():
    return nn.Sequential(Experts(), nn.Linear(3, 1))


@case(normal(3), n=4, n2=3, fallback_ok=True)
def experts_by_example():
    """Whole examples are routed; an expert sees between none and all of them."""
    return nn.Sequential(nn.Linear(3, 3), Experts(), nn.Linear(3, 2))


@case(normal(3, 3), fallback_ok=True)
def experts_by_scatter_add():
    def run(m, x):
        flat = x.reshape(-1, 3)
        gate, chosen = m.router(flat).softmax(-1).topk(2, -1)
        result = torch.zeros_like(flat)
        for i, expert in enumerate(m.experts):
            token, slot = (chosen == i).nonzero(as_tuple=True)
            result = result.index_add(0, token, expert(flat[token]).tanh() * gate[token, slot][:, None])
        return result.view_as(x).sum(1)

    return Call(run, router=nn.Linear(3, 3), experts=nn.ModuleList([nn.Linear(3, 3) for _ in range(3)]))


@case(normal(4, 3))
def gather_by_data():
    """The largest token of each example, chosen by a learned score, goes on."""

    def run(m, x):
        best = m.score(x).squeeze(-1).argmax(1)
        return m.head(torch.tanh(m.embed(x))[torch.arange(len(x)), best])

    return Call(run, score=nn.Linear(3, 1), embed=nn.Linear(3, 4), head=nn.Linear(4, 2))


@case(several(normal(3, 4), lambda n: torch.arange(n) % 3))
def last_valid_token():
    return Call(lambda m, x, last: m.net(x).gather(1, last[:, None, None].expand(-1, 1, 2))[:, 0], net=mlp())


@case(normal(4, 3), fallback_ok=True)
def graph_convolution():
    ring = torch.eye(4) + torch.eye(4).roll(1, 0) + torch.eye(4).roll(-1, 0)
    return Call(
        lambda m, x: m.b((m.ring / 3) @ torch.tanh(m.a((m.ring / 3) @ x))).mean(1),
        a=nn.Linear(3, 4),
        b=nn.Linear(4, 2),
        ring=ring,
    )


# --- overwritten tensors


@case(normal(4))
def relu_in_place():
    return nn.Sequential(
        nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)
    )


@case(normal(2, 4))
def relu_in_place_tokens():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2))


@case(normal(1, 4, 4))
def relu_in_place_conv_and_batch_norm():
    return nn.Sequential(
        nn.Conv2d(1, 2, 2),
        nn.ReLU(inplace=True),
        nn.Conv2d(2, 2, 2),
        nn.BatchNorm2d(2),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        nn.Linear(8, 2),
    )


@case(normal(4))
def residual_in_place():
    def run(m, x):
        y = m.a(x)
        y += x
        z = m.b(torch.tanh(y))
        z += y
        return m.head(F.relu(z, inplace=True))

    return Call(run, a=nn.Linear(4, 4), b=nn.Linear(4, 4), head=nn.Linear(4, 2))


@case(normal(4))
def product_in_place_with_a_parameter():
    def run(m, x):
        u = m.inner(x)
        u.mul_(m.gain).add_(m.shift)
        return torch.tanh_(u)

    return Call(run, inner=nn.Linear(4, 3), gain=weight(3), shift=weight(3))


@case(normal(4))
def written_into_a_slice():
    def run(m, x):
        h = torch.zeros(len(x), 5, dtype=x.dtype)
        h[:, :3] = m.a(x)
        h[:, 3:] = m.b(x)
        return m.head(h.tanh_())

    return Call(run, a=nn.Linear(4, 3), b=nn.Linear(4, 2), head=nn.Linear(5, 2))


@case(normal(4))
def input_overwritten():
    """The model overwrites its own input."""

    def run(m, x):
        return m.net(x.mul_(0.5).tanh_())

    return Call(run, net=mlp())


# --- recomputed activations


def checkpointed(use_reentrant):
    def run(m, x):
        if use_reentrant:
            x = x.detach().requires_grad_()  # else the reentrant kind drops the gradients, with a warning
        x = checkpoint(m.a, x, use_reentrant=use_reentrant)
        return m.head(checkpoint(m.b, x, use_reentrant=use_reentrant))

    return Call(run, a=mlp(4, 4), b=mlp(4, 3), head=nn.Linear(3, 2))


@case(normal(4), train=True, fallback_ok=True)
def checkpoint_not_reentrant():
    return checkpointed(False)


@case(normal(4), train=True, fallback_ok=True)
def checkpoint_reentrant():
    return checkpointed(True)
