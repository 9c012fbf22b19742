"""The commands beside the demo, as a user types them."""

import json
import subprocess
import sys
import urllib.request
import warnings

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import gramscope as gs
from gramscope.cli.main import app
from gramscope.cli.verify_command import default_target
from gramscope.store import RunWriter
from gramscope.tasks import mlp


def call(*arguments: str):
    return CliRunner().invoke(app, [str(a) for a in arguments])


CONFIG = """
[data]
name = "teacher-student"
n = 128

[model]
width = 8
depth = 2

[optimiser]
name = "adam"
lr = 0.01

[train]
steps = 6

[watch]
every = 3
probe = 5
measures = ["loss", "shares"]
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(CONFIG + f'out = "{tmp_path / "run"}"\n')
    return path


def test_run(config, tmp_path):
    done = call("run", config, "--json", "--set", "train.steps=4", "--set", "optimiser.name=sgd")
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("gramscope: 3 measurements at steps 0 to 4 ")
    found = json.loads(done.stdout)
    assert found["steps"] == 4
    run = gs.open_run(tmp_path / "run")
    assert list(run.scalars().index) == [0, 3, 4]
    assert run.meta["config"]["optimiser"]["name"] == "sgd"
    assert "out" not in run.meta["config"]["watch"], "a run may be moved, and its place is no setting"
    assert "accuracy/test" in run.scalars()


def test_a_run_can_be_diagnosed_by_every_rule_that_its_network_allows(config, tmp_path):
    assert call("run", config, "--set", "watch.measures=*", "--set", "train.steps=12").exit_code == 0
    found = gs.diagnose.diagnose(tmp_path / "run")
    assert all(why.startswith("not needed") for why in found.not_judged.values()), found.not_judged


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.name=nothing", "model.name must be one of"),
        ("nonsense.key=1", "[nonsense]"),
        ("model.colour=3", "model.colour is no key that fits this model. It may be width, depth."),
        ("model.widht=3", "Did you mean width"),
        ("train.stepps=3", "train.stepps is no key of [train]. Did you mean steps?"),
        ("watch.overheads=0.1", "Did you mean overhead"),
        ("optimizer.lr=1", "Did you mean optimiser"),
        ("optimiser.weight_deacy=0.9", "Did you mean weight_decay"),
        ("data.inptus=3", "Did you mean inputs"),
        ("train.steps=abc", "train.steps must be a whole number of at least 1, got 'abc'"),
        ("train.steps=-3", "train.steps must be a whole number of at least 1, got -3"),
        ("train.seed=1.5", "train.seed must be"),
        ("model.width=0", "model.width must be a whole number of at least 1, got 0"),
        ("optimiser.lr=abc", "optimiser.lr must be one finite number at least 0"),
        ("optimiser.betas=3", "[optimiser] has a value that does not fit"),
        ("data.n=-300", "n must be a whole number of at least 1, got -300"),
        ("watch.out=3", "watch.out must be the path"),
        ("watch.measures=3", "watch.measures must be a name or a list"),
        ("watch.every=never", "every must be"),
        ("train.loss=hinge", "train.loss must be"),
        ("broken", "section.key=value"),
    ],
)
def test_run_with_a_wrong_config(config, tmp_path, change, words):
    done = call("run", config, "--set", change)
    assert done.exit_code == 2
    assert words in done.output
    assert len(done.output.strip().splitlines()) == 1, "one line"
    assert not (tmp_path / "run").exists(), "nothing half-made is left behind"


def test_a_cnn_has_no_depth(config, tmp_path):
    done = call("run", config, "--set", "model.name=cnn")
    assert done.exit_code == 2
    assert done.output == "Error: model.depth is no key that fits this model. It may be width.\n"
    config.write_text(f'[model]\nname = "cnn"\nwidth = 2\n[train]\nsteps = 2\n[watch]\nmeasures = "loss"\n'
                      f'out = "{tmp_path / "run"}"\n')  # fmt: skip
    assert call("run", config).exit_code == 0
    assert gs.open_run(tmp_path / "run").meta["config"]["model"] == {"name": "cnn", "width": 2}


def test_more_than_the_data_has_is_noted(config):
    done = call("run", config, "--set", "train.batch=1000000", "--set", "watch.probe=100000")
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "Note: train.batch is 1,000,000, but the data has 128 training examples: all are taken." in said
    assert "Note: watch.probe is 100,000 examples of each class, but the smallest class has" in said
    assert "the probe has 128 examples in all." in said


def test_a_run_that_cannot_be_written_is_refused_before_training(config, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "else")
    for out in ("/proc/x/y", tmp_path / "file" / "x", tmp_path / "dangling"):
        done = call("run", config, "--set", f"watch.out={out}")
        assert done.exit_code == 2, (out, done.output)
        assert "Error: " in done.stderr
        assert "Run:" not in done.output


def test_nothing_is_trained_where_no_run_was_opened(config, tmp_path):
    from gramscope.cli import training_loop as training

    with pytest.raises(gs.InputError, match="no run could be opened in"):
        training._check_opened(tmp_path)
    assert call("run", config).exit_code == 0
    training._check_opened(tmp_path / "run")


def test_a_divergence_is_told_in_a_few_lines(config):
    changes = ["optimiser.name=sgd", "optimiser.lr=1e30", "train.loss=mse", "watch.measures=*", "watch.every=2"]
    done = call("run", config, *(part for change in changes for part in ("--set", change)))
    assert done.exit_code == 0, done.output
    lines = done.stderr.splitlines()
    assert 2 <= len(lines) < 8, done.stderr
    others = [line for line in lines if not line.startswith("Warning: ")]
    assert len(others) == 1
    assert others[0].startswith("gramscope: ")  # what was measured


def test_a_warning_of_each_kind_is_told_and_the_others_are_counted(capsys):
    from gramscope.cli import training_loop as training

    with training._briefly():
        for step in (5, 10):
            for measure in ("loss", "kernel"):
                warnings.warn(f"the measure {measure!r} failed at step {step}", gs.record.WatchWarning, stacklevel=1)
        warnings.warn("the disk is full", gs.record.WatchWarning, stacklevel=1)
    assert capsys.readouterr().err.splitlines() == [
        "Warning: the measure 'loss' failed at step 5",
        "Warning: the disk is full",
        "Warning: 3 more like these; the run has them all, and its report tells them.",
    ]


def test_a_warning_is_not_blamed_on_typer():
    code = (
        "import typer\nfrom gramscope.base.user_warnings import warn\napp = typer.Typer()\n"
        "@app.command()\ndef f(): pass\n"
        "exec(compile('def g(): warn(chr(120))', 'x', 'exec'), space := {'warn': warn, '__name__': 'gramscope.x'})\n"
        "app.command('g')(space['g'])\napp(['g'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.startswith("<string>:8: UserWarning: x"), done.stderr


def strictly(text):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.filterwarnings("ignore::gramscope.record.WatchWarning")
def test_a_run_that_diverges_gives_json_all_the_same(config):
    changes = ["optimiser.name=sgd", "optimiser.lr=1e30", "train.loss=mse", "watch.measures=loss"]
    done = call("run", config, "--json", *(part for change in changes for part in ("--set", change)))
    assert done.exit_code == 0, done.output
    assert strictly(done.stdout)["scalars"]["loss"] is None


def test_a_folder_with_a_run_is_not_written_again(config, tmp_path):
    assert call("run", config, "--json").exit_code == 0
    done = call("run", config)
    assert done.exit_code == 2
    assert f"{tmp_path / 'run'} holds one. Choose another, e.g. --set watch.out={tmp_path / 'run-2'}" in done.output
    assert "resume" not in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_a_folder_is_no_config(tmp_path):
    done = call("run", tmp_path)
    assert done.exit_code == 2
    assert done.output == f"Error: {tmp_path} must be a TOML file, but it is a directory.\n"


def test_what_to_type_next_can_be_pasted(config, tmp_path):
    done = call("run", config, "--set", f"watch.out={tmp_path / 'a b [x]'}")
    assert done.exit_code == 0, done.output
    assert f"gramscope report '{tmp_path / 'a b [x]'}'" in done.output


def test_python_m_gramscope():
    done = subprocess.run([sys.executable, "-m", "gramscope", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("gramscope 0.")


def test_analyze(tmp_path):
    model = mlp((30, 40, 20))
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "m.pt")
    one, two = (json.loads(call("analyze", tmp_path / name, "--json").output) for name in ("m.safetensors", "m.pt"))
    assert one == two
    assert {row["name"] for row in one["weights"]} == {"0.weight", "2.weight"}
    assert {row["name"] for row in one["skipped"]} == {"0.bias", "2.bias"}
    shown = call("analyze", tmp_path / "m.pt", "--out", tmp_path / "t.csv")
    assert shown.exit_code == 0, shown.output
    assert "alpha" in shown.output
    assert len((tmp_path / "t.csv").read_text().splitlines()) == 3


def test_analyze_says_what_it_has_no_numbers_for(tmp_path):
    torch.save({"bias": torch.ones(3), "scale": torch.ones(4)}, tmp_path / "vec.pt")
    done = call("analyze", tmp_path / "vec.pt")
    assert done.exit_code == 0, done.output
    assert "No spectra: vec.pt holds no weight matrix" in " ".join(done.output.split())
    assert "Left out: bias, scale (" in done.output
    assert "┃" not in done.output, "no empty table"
    torch.save({"[a].weight": torch.full((5, 5), float("nan")), "b.weight": torch.randn(30, 40)}, tmp_path / "nan.pt")
    done = call("analyze", tmp_path / "nan.pt")
    frame = gs.spectra.analyze(torch.load(tmp_path / "nan.pt"))
    reason = frame.set_index("name").loc["[a].weight", "reason"]
    assert reason
    assert f"[a].weight: {reason}" in " ".join(done.output.split())


def named(report):
    """Names of the rows, and reasons by the names of what was left out; no name may stand twice."""
    rows, left_out = ([row["name"] for row in report[part]] for part in ("weights", "skipped"))
    assert len({*rows, *left_out}) == len(rows) + len(left_out)
    return set(rows), {row["name"]: row["reason"] for row in report["skipped"]}


def analysed(path, content):
    torch.save(content, path)
    done = call("analyze", path, "--json")
    assert done.exit_code == 0, done.output
    return named(json.loads(done.output))


def test_analyze_names_every_tensor_beside_the_state_dict(tmp_path):
    state, matrix = {"0.weight": torch.randn(6, 8)}, torch.randn(5, 4)
    content = {"model": state, "ema": {"0.weight": matrix}, "head.weight": torch.randn(4, 3), "past": [matrix + 1]}
    rows, reasons = analysed(tmp_path / "m.pt", content)
    assert rows == {"0.weight"}
    assert set(reasons) == {"ema.0.weight", "head.weight", "past.0"}
    assert all("outside 'model'" in reason for reason in reasons.values())
    inner = {"model": {"state_dict": state, "extra": matrix}, "module": {"0.weight": matrix + 1}}
    rows, reasons = analysed(tmp_path / "inner.pt", inner)
    assert rows == {"0.weight"}
    assert set(reasons) == {"model.extra", "module.0.weight"}
    assert all("outside 'model.state_dict'" in reason for reason in reasons.values())


def test_analyze_finds_weights_under_other_names(tmp_path):
    content = {"backbone": {"0.weight": torch.randn(6, 8)}, "temp": torch.ones(()), "heads": [torch.randn(4, 3)]}
    rows, reasons = analysed(tmp_path / "m.pt", content)
    assert rows == {"backbone.0.weight", "heads.0"}
    assert set(reasons) == {"temp"}
    # The name of a state dict over something without tensors is none.
    rows, _ = analysed(tmp_path / "config.pt", {"model": {"name": "mlp"}, "0.weight": torch.randn(6, 8)})
    assert rows == {"0.weight"}


def test_analyze_leaves_out_the_state_of_an_optimiser(tmp_path):
    model = mlp((6, 5, 4))
    optimiser = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 6)).sum().backward()
    optimiser.step()
    rows, reasons = analysed(tmp_path / "m.pt", {"net": model.state_dict(), "opt": optimiser.state_dict()})
    assert rows == {"net.0.weight", "net.2.weight"}
    assert "optimiser" in reasons["opt.state.0.exp_avg"]
    assert len(reasons) == 2 + 4 * 3  # biases; step and two moments of each parameter
    torch.save(optimiser.state_dict(), tmp_path / "opt.pt")
    done = call("analyze", tmp_path / "opt.pt")
    assert done.exit_code == 2
    assert "optimiser" in done.output
    shown = call("analyze", tmp_path / "m.pt").output
    assert shown.count("optimiser") == 1, "a reason is told once"


def test_analyze_loses_no_tensor_to_an_equal_name_or_a_loop(tmp_path):
    looped = {"a": {"b": torch.randn(6, 8)}, "a.b": torch.randn(7, 8), "last": torch.randn(5, 8)}
    looped["again"] = looped["model"] = looped
    rows, _ = analysed(tmp_path / "m.pt", looped)
    assert rows == {"a.b", "a.b (2)", "last"}
    many = {f"{i}.bias": torch.ones(2) for i in range(200)}
    torch.save({"weight": torch.randn(6, 8), **many}, tmp_path / "many.pt")
    done = call("analyze", tmp_path / "many.pt")
    assert "and 170 more" in " ".join(done.output.split())


def test_analyze_makes_the_folder_of_its_table(tmp_path):
    torch.save({"weight": torch.randn(6, 8)}, tmp_path / "m.pt")
    done = call("analyze", tmp_path / "m.pt", "--out", tmp_path / "x" / "y.csv")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "x" / "y.csv").read_text().count("\n") == 2
    for wrong, words in ((tmp_path / "x", "is a folder"), (tmp_path / "m.pt" / "y.csv", "writing the table")):
        done = call("analyze", tmp_path / "m.pt", "--out", wrong)
        assert done.exit_code == 2
        assert words in done.output
        assert len(done.output.strip().splitlines()) == 1


def test_analyze_runs_no_code_from_a_file(tmp_path):
    class Trap:
        def __reduce__(self):
            return (exec, ("open('trapped', 'w')",))

    torch.save(Trap(), tmp_path / "trap.pt")
    done = call("analyze", tmp_path / "trap.pt")
    assert done.exit_code == 2
    assert "weights_only=True" in done.output
    assert not (tmp_path / "trapped").exists()
    done = call("analyze", tmp_path / "missing.pt", "--json")
    assert "no such file" in done.output


@pytest.mark.parametrize("kind", ["module", "cut", "text", "folder"])
def test_a_bad_checkpoint_is_told_in_our_words(tmp_path, kind):
    path = tmp_path / "m.pt"
    if kind == "folder":
        path.mkdir()
    else:
        torch.save(mlp((3, 4, 2)), path)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:200])
    if kind == "text":
        path.write_text("no tensors here")
    done = call("analyze", path)
    assert done.exit_code == 2
    assert "weights_only=False" not in done.output, "that would run the file's code"
    assert "weights_only`" not in done.output
    assert len(done.output.strip().splitlines()) == 1
    assert "must be a checkpoint of plain tensors" in done.output


def test_the_built_in_model_leaves_the_streams_of_all_devices_alone(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    (one, x), (two, _) = default_target(), default_target()
    assert torch.equal(before, torch.get_rng_state())
    assert seeded == [], "before CUDA starts, the seed would wait for it"
    assert torch.equal(one(x), two(x))


def test_verify_the_built_in_and_an_own_model(tmp_path):
    done = call("verify", "--json")
    assert done.exit_code == 0, done.output
    findings = json.loads(done.output)
    assert len(findings) == 10
    assert all(f["passed"] and f["error"] is not None for f in findings)
    (tmp_path / "mine.py").write_text(
        "import torch\ndef build():\n    torch.manual_seed(0)\n    return torch.nn.Sequential(torch.nn.Linear(3, 4), "
        "torch.nn.ReLU(), torch.nn.Linear(4, 2)), torch.randn(5, 3)\n"
    )
    done = call("verify", f"{tmp_path / 'mine.py'}:build")
    assert done.exit_code == 0, done.output
    assert "holds" in done.output


def test_verify_fails_on_a_wrong_kernel(monkeypatch):
    from gramscope.cli import verify_command as verify

    wrong = dict(verify.CHECKS)
    wrong["a wrong identity"] = (lambda w: 1.0, 1e-3)
    monkeypatch.setattr(verify, "CHECKS", wrong)
    done = call("verify")
    assert done.exit_code == 1
    assert "FAILS" in done.output


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nothing", "module:callable"),
        ("no_such_module:f", "but it raised ModuleNotFoundError: No module named 'no_such_module'."),
    ],
)
def test_verify_with_a_wrong_target(target, words):
    done = call("verify", target)
    assert done.exit_code == 2
    assert words in done.output


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def f():\n    raise ValueError('inside')", "but it raised ValueError: inside (mine.py, line 2)."),
        ("def f(width):\n    return width", "but it needs some: missing a required argument: 'width'"),
        ("1 / 0", "but it raised ZeroDivisionError: division by zero (mine.py, line 1)."),
        ("def f(:", "but it raised SyntaxError: invalid syntax (mine.py, line 1)."),
        ("import json\ndef f():\n    json.loads('{')", "(mine.py, line 3)."),
        ("import sys\ndef f():\n    sys.exit(7)", "but it called sys.exit(7) (mine.py, line 3)."),
        ("import no_such_thing", "No module named 'no_such_thing' (mine.py, line 1)."),
    ],
)
def test_verify_tells_what_the_users_code_raised(tmp_path, code, words):
    (tmp_path / "mine.py").write_text(code)
    done = call("verify", f"{tmp_path / 'mine.py'}:f")
    assert done.exit_code == 2
    assert words in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_verify_takes_some_of_very_many_outputs():
    from gramscope.cli import verify_command as verify

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 500))
    findings = verify.verify(model, torch.randn(3, 5), examples=2)
    assert all(f.passed and f.error is not None for f in findings)
    assert {f.note for f in findings} == {"Checked on 32 of the 500 outputs, evenly from the first to the last."}


def test_report_of_a_run(config, tmp_path):
    assert call("run", config, "--json").exit_code == 0
    done = call("report", tmp_path / "run", "-o", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert "<html" in (tmp_path / "page.html").read_text(encoding="utf-8")
    missing = call("report", tmp_path / "nowhere", "-o", tmp_path / "other.html")
    assert missing.exit_code == 2
    assert not (tmp_path / "other.html").exists()


def test_report_of_a_folder_and_of_a_pattern(tmp_path):
    for name in ("lr-10", "lr-2", "other"):
        with RunWriter.create(tmp_path / "runs" / name) as writer:
            writer.append(0, {"loss": 1.0})
    for source, names in ((tmp_path / "runs", ["lr-2", "lr-10", "other"]), (tmp_path / "runs/lr-*", ["lr-2", "lr-10"])):
        done = call("report", source, "-o", tmp_path / "page.html")
        assert done.exit_code == 0, done.output
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert [name for name in ("lr-2", "lr-10", "other") if f'"name":"{name}"' in page] == names


@pytest.mark.parametrize("served", ["run", ""])
def test_serve_tells_its_address(config, tmp_path, served):
    """Of a run, or of the folder that it lies in."""
    assert call("run", config, "--json").exit_code == 0
    command = [sys.executable, "-m", "gramscope.cli.main", "serve", str(tmp_path / served), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = json.loads(process.stdout.readline())["url"]
        page = urllib.request.urlopen(url).read()
        process.terminate()
    assert b"<html" in page
    assert call("serve", tmp_path / "nowhere", "--json").exit_code == 2


def test_help_is_fast_and_teaches():
    done = call("--help")
    for command in ("demo", "run", "analyze", "verify", "report", "serve"):
        assert command in done.stdout
        assert "Example" in call(command, "--help").output
    heavy = ("torch", "pandas", "scipy", "sklearn")
    code = f"import sys, gramscope.cli.main; print([m for m in {heavy} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert loaded == "[]", "help must not wait for these; it answers in about a tenth of a second without"
