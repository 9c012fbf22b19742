"""Budgets are kept by networks of every kind: the bytes of all tensors alive at once, counted one by one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from gramscope.base import arithmetic
from gramscope.capture.capturing import opened
from gramscope.capture.working_set import working_bytes
from gramscope.kernels import memory as plans
from references.counting import CountFlops, LivePeak


class Residual(nn.Module):
    def __init__(self, fan_in, fan_out, stride):
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False), nn.BatchNorm2d(fan_out), nn.ReLU(),
            nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False), nn.BatchNorm2d(fan_out),
        )  # fmt: skip
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(fan_in, fan_out, 1, stride, bias=False)

    def forward(self, x):
        return torch.relu(self.branch(x) + self.shortcut(x))


class Block(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.first, self.second, self.heads, self.causal = nn.LayerNorm(width), nn.LayerNorm(width), heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    """With one table for its input and its output."""

    def __init__(self, words=60, width=32, length=16):
        super().__init__()
        self.table, self.place = nn.Embedding(words, width), nn.Parameter(torch.randn(length, width))
        self.blocks, self.norm = nn.Sequential(Block(width, 4, True), Block(width, 4, True)), nn.LayerNorm(width)

    def forward(self, ids):
        return F.linear(self.norm(self.blocks(self.table(ids) + self.place)), self.table.weight)


class ViT(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.patches, self.place = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.randn(16, width))
        self.blocks, self.head = nn.Sequential(Block(width, 4, False), Block(width, 4, False)), nn.Linear(width, 5)

    def forward(self, x):
        return self.head(self.blocks(self.patches(x).flatten(2).mT + self.place).mean(1))


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 32, 2, batch_first=True), nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def loss(model, ids):
    """Each text's own."""
    logits = model(ids)[:, :-1]
    each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return each.unflatten(0, (len(ids), -1)).mean(1, keepdim=True)


def mlp():
    return nn.Sequential(nn.Linear(50, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


def cnn():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(2304, 5))


def resnet():
    start = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    blocks = Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 32, 2)
    return nn.Sequential(*start, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)).eval()


def images(n):
    return torch.randn(n, 3, 16, 16)


def texts(n):
    return torch.randint(60, (n, 16))


NETWORKS = {
    "mlp": (mlp, lambda n: torch.randn(n, 50), None),
    "cnn": (cnn, images, None),
    "resnet": (resnet, images, None),
    "vit": (ViT, images, None),
    "gpt, loss": (GPT, texts, loss),
    "gpt, words": (GPT, texts, lambda model, ids: model(ids)[:, -1, :5]),
    "lstm": (LSTM, lambda n: torch.randn(n, 12, 8), None),
}


def problem(name, n):
    torch.manual_seed(0)
    build, data, outputs = NETWORKS[name]
    return build(), data(n), outputs


def measured(model, x, **options):
    with LivePeak() as memory:
        kernel = gs.ntk(model, x, **options)
    return kernel, memory.peak


@pytest.mark.parametrize(("reduce", "n", "share"), [("trace", 6, 0.8), ("trace", 24, 0.4), ("none", 12, 0.6)])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_bytes_of_all_tensors_stay_within_the_budget(name, reduce, n, share):
    model, x, outputs = problem(name, n)
    options = {"outputs": outputs, "reduce": reduce}
    whole, free = measured(model, x, **options, memory="10GB")
    budget = int(share * free) + 2**16  # random states and the like are not small beside so small networks
    kernel, peak = measured(model, x, **options, memory=budget)
    assert peak <= budget, f"{peak / budget:.2f} of {budget:,}"
    # Other blocks: the same sums in another order, in float32.
    torch.testing.assert_close(kernel, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize("reduce", ["trace", "none"])
@pytest.mark.parametrize("name", ["resnet", "lstm"])
def test_the_budget_holds_where_the_two_sides_cannot_share_a_forward_pass(name, reduce):
    """Inputs of another size: the signals of one side wait for those of the other."""
    model, x, _ = problem(name, 16)
    x2 = x[:12, :9].clone() if name == "lstm" else x[:12, :, :12, :12].clone()
    whole, free = measured(model, x, x2=x2, reduce=reduce, memory="10GB")
    budget = int(0.5 * free) + 2**16
    kernel, peak = measured(model, x, x2=x2, reduce=reduce, memory=budget)
    assert peak <= budget, f"{peak / budget:.2f} of {budget:,}"
    torch.testing.assert_close(kernel, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize("name", ["cnn", "vit", "gpt, loss"])
def test_a_kernel_on_disk_stays_within_the_budget_and_leaves_nothing_behind(name, tmp_path):
    """Tile after tile: what one left alive would add up."""
    model, x, outputs = problem(name, 9)
    options = {"outputs": outputs, "reduce": "trace"}
    whole, free = measured(model, x, **options, memory="10GB")
    budget = int(0.6 * free) + 2**16
    with LivePeak() as memory:
        kernel = gs.ntk(model, x, **options, memory=budget, out=tmp_path / "K", tile=4)
        torch.zeros(())  # the counter looks at what was freed
    assert len(kernel.plan.tiles) == 6
    assert memory.peak <= budget, f"{memory.peak / budget:.2f} of {budget:,}"
    assert memory.live < 2**10
    torch.testing.assert_close(kernel.to_tensor(), whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_working_set_is_what_a_backward_pass_holds(name):
    """Its count from the graph against the bytes alive, with the finest cuts and one direction."""
    model, x, outputs = problem(name, 6)
    with LivePeak() as memory, opened(model, x, outputs=outputs) as network:
        sites, cotangents = network.weight_sites, network.cotangents(some=slice(0, 1))
        counted = working_bytes(sites.graph, sites.edges, sites.waiting)
        torch.zeros(())  # the counter looks at what was freed
        before = memory.peak = memory.live
        for group in sites.sites(cotangents, 1):
            del group
    # Not in it: small sums. Counted twice: signals that several uses of a weight share, and copies that views spare.
    assert 0.98 * (memory.peak - before) <= counted <= 2.5 * (memory.peak - before)


@pytest.mark.parametrize("name", NETWORKS)
def test_large_work_of_a_gpu_keeps_to_its_budget(name, monkeypatch):
    """One output at a time with fused attention, or several together where that saves work: on the CPU, for once."""
    model, x, outputs = problem(name, 24)
    options = {"outputs": outputs, "reduce": "trace"}
    whole, free = measured(model, x, **options, memory="10GB")
    monkeypatch.setattr(plans, "ONE_BY_ONE", {"cpu"})
    monkeypatch.setattr(plans, "LARGE", 0)
    for budget in (2 * free, int(0.6 * free) + 2**16):
        kernel, peak = measured(model, x, **options, memory=budget)
        assert peak <= budget, f"{peak / budget:.2f} of {budget:,}"
        torch.testing.assert_close(kernel, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


def test_outputs_of_a_trace_are_contracted_together_where_inputs_would_meet_again(monkeypatch):
    """Wide layers of few positions: one Gram matrix of the inputs for all outputs, not one for each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 64, 3), nn.Flatten(), nn.Linear(64 * 4, 10))
    x = torch.randn(32, 8, 4, 4)
    monkeypatch.setattr(plans, "ONE_BY_ONE", {"cpu"})
    monkeypatch.setattr(plans, "LARGE", 0)
    monkeypatch.setattr(arithmetic, "WORTH", 2**62)  # torch's own products, which are counted
    counted = []
    for worth in (1.2, 1e9):
        monkeypatch.setattr(plans, "WORTH", worth)
        with CountFlops() as count:
            gs.ntk(model, x, reduce="trace", memory="1GB")
        counted.append(count.total)
    assert counted[0] < 0.7 * counted[1], counted


def test_less_memory_costs_passes_and_not_more():
    """At a quarter of what it takes at once, examples pass about as often as blocks of a quarter make them."""
    model, x, _ = problem("resnet", 24)
    _, free = measured(model, x, reduce="trace", memory="10GB")
    passed = []
    model.register_forward_hook(lambda module, args, output: passed.append(len(output)))
    gs.ntk(model, x, reduce="trace", memory=int(0.25 * free))
    assert sum(passed) < 12 * 24
