"""A vocabulary of outputs at every token: the measures against their definitions, written out in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from gramscope.record.along_loss import SAMPLED_POSITIONS, sample_positions
from gramscope.record.condensed import EXACT_OUTPUTS, FEW_MIXTURES, MIXTURES, SEED
from gramscope.record.measurement import OUTPUT_ROWS

N, T, V, D = 5, 12, 23, 6
OPTIONS = {"on_error": "raise", "overhead": None, "every": 1}


class Language(nn.Module):
    """One block of causal attention; the table of tokens is also the last layer."""

    def __init__(self, vocabulary: int = V, width: int = D) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def hidden(self, input_ids):
        x = self.table(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], dtype=x.dtype)
        x = x + self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(x)

    def forward(self, input_ids):
        return self.hidden(input_ids) @ self.table.weight.T


@pytest.fixture
def language():
    torch.manual_seed(0)
    ids = torch.randint(0, V, (N, T + 1))
    x, y = ids[:, :-1], ids[:, 1:].clone()
    y[0, :3], y[4] = -100, -100
    return Language().double(), x, y


def seen_by(model, x, y, **options):
    scope = gs.watch(model, (x, y), **{**OPTIONS, **options})
    return scope.records[-1]["scalars"]


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def test_loss_accuracy_and_shares_are_those_of_one_backward_pass(language):
    model, x, y = language
    assert T * V > EXACT_OUTPUTS
    seen = seen_by(model, x, y, measures=["loss", "shares"])
    loss = loss_of(model, x, y)
    loss.backward()
    assert seen["loss/probe"] == pytest.approx(float(loss.detach()), rel=1e-12)
    right = (model(x).argmax(-1) == y)[y != -100]
    assert seen["accuracy/probe"] == pytest.approx(float(right.double().mean()))
    sizes: dict[str, float] = {}
    for name, p in model.named_parameters():
        layer = name.rpartition(".")[0]
        sizes[layer] = sizes.get(layer, 0.0) + float(p.grad.square().sum())
    shares = {name: value for name, value in seen.items() if name.startswith("share/")}
    assert shares == pytest.approx({f"share/{k}": v / sum(sizes.values()) for k, v in sizes.items()}, rel=1e-9)


def test_the_kernel_is_known_to_be_expensive_before_it_was_taken_warm(language):
    """Its own forward pass, and a backward pass for each mixture. With a label for each example none is known."""
    model, x, y = language
    subject = gs.watch(model, (x, y), measures="loss", **OPTIONS).subject
    assert gs.record.WATCHED_MEASURES["kernel"].passes(subject) == 1 + FEW_MIXTURES
    single = gs.watch(nn.Linear(3, 100), (torch.randn(4, 3), torch.arange(4)), measures="loss", **OPTIONS).subject
    assert gs.record.WATCHED_MEASURES["kernel"].passes(single) == 0


@pytest.mark.parametrize("together", [0, 32])
def test_the_kernel_is_that_of_random_mixtures_with_its_error(language, together, monkeypatch):
    """Whether the mixtures have one kernel together or one each."""
    monkeypatch.setattr("gramscope.record.measurement.ROWS_TOGETHER", together)
    model, x, y = language
    scope = gs.watch(model, (x, y), measures="kernel", **OPTIONS)
    start = gs.kernels.projected_trace(model, x, k=FEW_MIXTURES, seed=SEED)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    scope.step()
    now = gs.kernels.projected_trace(model, x, k=FEW_MIXTURES, seed=SEED)
    seen = scope.records[-1]["scalars"]
    drift = (now.kernel - start.kernel).norm() / start.kernel.norm()
    assert seen["kernel/drift"] == pytest.approx(float(drift), rel=1e-9)
    assert seen["kernel/standard_error"] == pytest.approx(
        float(now.standard_error.norm() / now.kernel.norm()), rel=1e-6
    )
    rows = torch.zeros(N, T, V).double()
    for example in range(N):
        for place in range(T):
            if y[example, place] != -100:
                rows[example, place, y[example, place]] = 1
    alignment = gs.measures.kernel_target_alignment(now.kernel, rows.flatten(1))
    assert seen["kernel/alignment"] == pytest.approx(alignment, rel=1e-9)
    exact = gs.ntk(model, x, reduce="trace")
    assert float((now.kernel - exact).norm() / exact.norm()) < 4 * seen["kernel/standard_error"], (
        "it estimates the trace"
    )


def test_outputs_in_parts_are_the_same(language, monkeypatch):
    model, x, y = language
    whole = seen_by(model, x, y, measures=["loss", "shares", "kernel"])
    monkeypatch.setattr("gramscope.record.condensed.CHUNK", 50)
    assert seen_by(model, x, y, measures=["loss", "shares", "kernel"]) == pytest.approx(whole, rel=1e-12)


def test_features_of_the_last_layer_at_sampled_positions(language):
    model, x, y = language
    seen = seen_by(model, x, y, measures=["richness", "target_linearity"])
    places = sample_positions(y)
    counted = [place for place in range(N * T) if y.flatten()[place] != -100]
    assert sorted(places.tolist()) == counted, "all of them, where they are few"
    features, outputs = model.hidden(x).detach().flatten(0, 1)[places], model(x).detach().flatten(0, 1)[places]
    targets = F.one_hot(y.flatten()[places], V).double()
    assert seen["richness"] == pytest.approx(gs.measures.richness(features, outputs), rel=1e-9)
    expected = gs.measures.target_linearity(features, targets)
    assert {k: v for k, v in seen.items() if "linearity" in k} == pytest.approx(
        {"target_linearity/table": expected, "target_linearity_null/table": expected.null}
    )


def test_later_measurements_make_one_plain_pass_and_see_the_same(language):
    """The first goes through the weight sites; what comes after costs one forward and one backward pass."""
    model, x, y = language
    measures = ["loss", "shares", "gradient", "richness", "target_linearity", "dead_units"]
    scope = gs.watch(model, (x, y), measures=measures, **OPTIONS)
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    scope.step()
    assert len(passes) == 1
    later, anew = scope.records[-1]["scalars"], seen_by(model, x, y, measures=measures)
    later.pop("overhead")
    del later["richness/initial_similarity"]
    assert later == pytest.approx(anew, rel=1e-9)


class Turned(Language):
    """Positions first on the way to the head: the rows of its input are in another order than the labels."""

    def forward(self, x):
        return F.linear(self.hidden(x).transpose(0, 1), self.table.weight).transpose(0, 1)


def test_inputs_of_the_last_layer_in_another_order_are_left_to_the_sites():
    torch.manual_seed(0)
    model = Turned(V, 6).double()
    ids = torch.randint(0, V, (N, T + 1))
    x, y = ids[:, :-1], ids[:, 1:]
    scope = gs.watch(model, (x, y), measures=["target_linearity", "loss"], **OPTIONS)
    scope.step()
    places = sample_positions(y)
    features, targets = model.hidden(x).detach().flatten(0, 1)[places], F.one_hot(y.flatten()[places], V).double()
    expected = float(gs.measures.target_linearity(features, targets))
    assert [r["scalars"]["target_linearity/table"] for r in scope.records] == pytest.approx([expected] * 2)


def test_hooks_on_parameters_neither_run_nor_change_what_is_measured(language):
    model, x, y = language
    expected = seen_by(model, x, y, measures=["gradient", "sharpness"])
    calls = []
    handle = model.table.weight.register_hook(lambda g: calls.append(1) or 0 * g)
    scope = gs.watch(model, (x, y), measures=["gradient", "sharpness"], **OPTIONS)
    scope.step()
    assert not calls
    assert scope.records[-1]["scalars"]["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-9)
    loss_of(model, x, y).backward()
    assert calls == [1]
    handle.remove()
    loss_of(model, x, y).backward()
    assert calls == [1]


def test_a_sample_of_positions_is_the_same_every_time():
    y = torch.randint(0, 9, (40, 100))
    y[:, ::2] = -100
    places = sample_positions(y)
    assert len(places) == 2000 < SAMPLED_POSITIONS
    y = torch.zeros(60, 100, dtype=torch.int64)
    places = sample_positions(y)
    assert len(places.unique()) == len(places) == SAMPLED_POSITIONS > OUTPUT_ROWS
    assert torch.equal(places, sample_positions(y))


def test_a_step_is_explained_by_the_loss_of_each_example(language):
    model, x, y = language
    lr = 0.5
    seen = seen_by(model, x, y, measures="step", lr=lr)

    def losses(model):
        each = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").reshape(N, T)
        return each.sum(1) / (y != -100).sum()

    after = copy.deepcopy(model)
    loss_of(after, x, y).backward()
    with torch.no_grad():
        for p in after.parameters():
            p.sub_(lr * p.grad)
        true = losses(after) - losses(model)
    jacobian = [torch.autograd.grad(value, list(model.parameters()), retain_graph=True) for value in losses(model)]
    steps = [-lr * p.grad for p in after.parameters()]
    predicted = torch.stack([sum((g * s).sum() for g, s in zip(row, steps, strict=True)) for row in jacobian])
    assert seen["step/true_loss_change"] == pytest.approx(float(true.sum()), rel=1e-9)
    assert seen["step/predicted_loss_change"] == pytest.approx(float(predicted.sum()), rel=1e-9)
    assert seen["step/error"] == pytest.approx(float((true - predicted).norm() / true.norm()), rel=1e-6)


def test_what_stands_for_the_outputs_is_said(language, tmp_path):
    model, x, y = language
    gs.watch(model, (x, y), tmp_path / "run", measures="loss").close()
    said = gs.open_run(tmp_path / "run").meta["probe"]
    assert said["kernel"] == f"estimated from 2 random mixtures of {T * V} outputs, seed 0"
    assert said["features"] == f"of the last layer, at {N * T - 3 - T} of {N * T - 3 - T} labelled positions, seed 0"
    assert said["step"] == "changes of the loss of each example, not of its outputs"


def test_outputs_too_many_for_a_pass_each():
    """3.2 million outputs: one row of an identity for each would be 40 TB."""
    torch.manual_seed(0)
    ids = torch.randint(0, 50_000, (2, 65))
    model = Language(50_000, 4)
    scope = gs.watch(model, (ids[:, :-1], ids[:, 1:]), lr=0.1, measures=["loss", "shares", "kernel", "step"], **OPTIONS)
    seen = scope.records[-1]["scalars"]
    assert {"loss/probe", "kernel/participation_ratio", "kernel/standard_error", "share/table", "step/error"} <= set(
        seen
    )


def test_a_loss_of_ones_own_of_very_many_outputs(language):
    model, x, y = language

    def loss(f, y):
        return f.square().mean() + f.flatten(1).norm(dim=1).prod()  # which no sum over examples makes

    seen = seen_by(model, x, y, measures=["loss", "shares", "kernel"], loss=loss)
    value = loss(model(x), y)
    value.backward()
    assert seen["loss/probe"] == pytest.approx(float(value.detach()))
    total = sum(float(p.grad.square().sum()) for p in model.parameters())
    assert seen["share/table"] == pytest.approx(float(model.table.weight.grad.square().sum()) / total)


def test_without_targets_the_kernel_and_the_norm_are_left(language):
    model, x, _ = language
    scope = gs.watch(model, x, measures=["kernel", "norm"], **OPTIONS)
    expected = gs.kernels.projected_trace(model, x, k=MIXTURES, seed=SEED).kernel
    square, trace = float(expected.square().sum()), float(expected.trace())
    assert scope.records[0]["scalars"]["kernel/participation_ratio"] == pytest.approx(trace**2 / square)


def test_the_outputs_can_still_be_had(language, monkeypatch):
    """A measure of one's own may ask for all of them."""
    model, x, y = language
    found = []
    measure = gs.record.WatchedMeasure("own", lambda m: found.append(m.f) or gs.record.MeasuredValues(), False, "")
    monkeypatch.setitem(gs.record.WATCHED_MEASURES, "own", measure)
    seen_by(model, x, y, measures=["own", "loss"])
    assert torch.allclose(found[0], model(x).detach().flatten(1))


def test_many_classes_of_whole_examples():
    """A hundred classes: the kernel is estimated, all else is as with few."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 100)).double()
    x, y = torch.randn(40, 5).double(), torch.arange(40)
    seen = seen_by(model, x, y, measures=["loss", "kernel", "richness", "target_linearity", "shares"])
    f, hidden = model(x).detach(), model[:2](x).detach()
    assert seen["loss/probe"] == pytest.approx(float(F.cross_entropy(f, y)))
    assert seen["richness"] == pytest.approx(gs.measures.richness(hidden, f))
    assert seen["target_linearity/2"] == pytest.approx(
        float(gs.measures.target_linearity(hidden, F.one_hot(y, 100).double()))
    )
    assert "kernel/standard_error" in seen


@pytest.mark.parametrize("causal", [True, False])
def test_a_batch_as_hugging_face_models_are_trained_on(causal):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    ids = torch.randint(0, 60, (3, 16))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    if causal:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=60, **sizes)).eval()
        labels = torch.where(mask == 1, ids, -100)
    else:
        config = transformers.GPT2Config(vocab_size=60, num_labels=3, pad_token_id=0, **sizes)
        model, labels = transformers.GPT2ForSequenceClassification(config).eval(), torch.tensor([0, 2, 1])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    scope = gs.watch(model, batch, measures=["loss", "shares", "kernel"], **OPTIONS)
    seen = scope.records[0]["scalars"]
    assert seen["loss/probe"] == pytest.approx(float(model(**batch).loss.detach()), rel=1e-5)
    assert {"kernel/alignment", "accuracy/probe"} <= set(seen)
