"""Hugging Face models as they are wrapped for training: compiled, and prepared by accelerate."""

import pytest
import torch

import gramscope as gs

IDS = torch.randint(0, 7, (3, 4), generator=torch.Generator().manual_seed(0))
STEPS = 2
MEASURES = ["loss", "shares", "gradient", "weights", "update", "dead_units", "sharpness"]


def gpt():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=7, n_positions=8, n_embd=8, n_layer=1, n_head=2, activation_function="relu"
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def compiled(model, optimizer):
    return torch.compile(model, backend="eager"), optimizer


def compiled_in_place(model, optimizer):
    model.compile(backend="eager")
    return model, optimizer


def accelerated(model, optimizer):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # another test may have set it up
    return accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model, optimizer)


def train(wrap, out):
    """Parameters, momenta and the random stream after training."""
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = wrap(model, optimizer)
    scope = None
    if out is not None:
        probe = ({"input_ids": IDS[:, :-1]}, IDS[:, 1:])
        options = {"every": 2, "overhead": None, "on_error": "raise", "measures": MEASURES}
        scope = gs.watch(model, probe, out, **options).attach(optimizer)
    model.train()
    torch.manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    if scope is not None:
        scope.close()
    state = [p.detach().clone() for p in model.parameters()]
    state += [v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return [*state, torch.get_rng_state()], scope


@pytest.mark.parametrize("wrap", [compiled, compiled_in_place, accelerated], ids=lambda wrap: wrap.__name__)
def test_wrapped_models_train_the_same_and_are_measured(wrap, tmp_path):
    without, _ = train(wrap, None)
    watched, scope = train(wrap, tmp_path / "run")
    assert len(without) == len(watched)
    assert all(map(torch.equal, without, watched))
    assert [record["step"] for record in scope.records] == [0, 2]
    last = scope.records[-1]
    assert not last["failures"]
    names = ("loss/probe", "share/transformer.h.0.mlp.c_fc", "update_ratio/transformer.wte", "sharpness")
    assert {*names, "dead_units/transformer.h.0.mlp.c_fc", "gradient_norm/transformer.h.0.attn.c_attn"} <= last[
        "scalars"
    ].keys()


def test_an_encoder_decoder_is_given_what_it_makes_of_its_labels():
    """As T5's: the decoder's inputs are the labels, moved by one."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    ids = torch.randint(1, 50, (4, 6))
    scope = gs.watch(model, {"input_ids": ids, "labels": ids}, measures=["loss", "shares"], on_error="raise")
    expected = float(model(input_ids=ids, labels=ids).loss.detach())
    assert scope.records[0]["scalars"]["loss/probe"] == pytest.approx(expected, rel=1e-5)
