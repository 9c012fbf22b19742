"""``gramscope``: the commands. Heavy imports happen inside them, so that ``--help`` answers at once."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gramscope.base.errors import GramscopeError
from gramscope.cli.printed import json_line, versions

app = typer.Typer(
    name="gramscope",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.", metavar="")]


def _version(show: bool | None) -> None:
    if show:
        typer.echo("\n".join(f"{name} {version}" for name, version in versions().items()))
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool | None,
        typer.Option(
            "--version", callback=_version, is_eager=True, metavar="", help="Versions of gramscope, torch and CUDA."
        ),
    ] = None,
) -> None:
    """Example:  gramscope demo;  gramscope COMMAND --help

    See how a neural network learns, layer by layer.

    gs.watch in your training loop writes a run into a folder. report, serve and diagnose read such folders.
    analyze needs only a checkpoint. verify checks our numbers on your own model.
    """


@app.command(short_help="Train one network twice, with and without feature learning, and compare.")
def demo(
    out: Annotated[Path, typer.Option(help="Folder of runs and report; a number is added if it is taken.")] = Path(
        "gramscope-demo"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 400,
    width: Annotated[int, typer.Option(min=1, help="Width of the hidden layers.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of weights and data order.")] = 0,
    as_json: Json = False,
) -> None:
    """Example:  gramscope demo --steps 1000 --out my-demo

    Train one network on handwritten digits twice, in the feature-learning and in the lazy regime, and compare them.
    """
    import torch

    from gramscope.cli.demo import run

    torch.set_num_threads(1)  # the networks are tiny, and on a busy machine threads wait for one another
    with _explained(as_json):
        run(out, steps, width, seed, as_json)


@app.command(short_help="Train and watch what a config file describes.")
def run(
    config: Annotated[Path, typer.Argument(help="A TOML file; docs/cli.md lists all keys.", metavar="CONFIG")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override one key, e.g. --set optimiser.lr=0.01", metavar="KEY=VALUE"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Example:  gramscope run experiment.toml --set train.steps=2000

    Train and watch what a config file describes: data set, model, optimiser, schedule, measures.

    Loss and test accuracy are printed at every measurement.
    """
    with _explained(as_json):
        from gramscope.cli.config import run_config

        found = run_config(config, changes or [], quiet=as_json)
        if as_json:
            typer.echo(json_line(found))


@app.command(short_help="Train and watch one run for every combination of a grid.")
def sweep(
    config: Annotated[Path, typer.Argument(help="A TOML file, as for gramscope run.", metavar="CONFIG")],
    more: Annotated[
        list[str] | None, typer.Argument(help="More keys of the grid, as after --grid.", metavar="[KEY=VALUES]...")
    ] = None,
    grid: Annotated[
        list[str] | None, typer.Option(help="Values of a key, e.g. lr=1e-3,1e-2", metavar="KEY=VALUES")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the sweep; a sweep in it is continued.")] = Path(
        "sweep"
    ),
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    engine: Annotated[
        str, typer.Option(help="local, slurm, submitit (Slurm's steps on this machine) or ray.")
    ] = "local",
    retries: Annotated[int, typer.Option(min=0, help="How often a run that failed is tried again.")] = 1,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key in all runs.", metavar="KEY=VALUE")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", help="For slurm, e.g. slurm_partition=gpu or timeout_min=60", metavar="KEY=VALUE"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Example:  gramscope sweep experiment.toml --grid lr=1e-3,1e-2 width=64,256 --jobs 4

    Train and watch one run for every combination of a grid. Called again, it does only the runs that are not done.

    Exit code 1 if a run failed. All runs on one page: gramscope report SWEEP.
    """
    with _explained(as_json):
        from gramscope.cli.sweep_command import sweep_config

        found = sweep_config(
            config, [*(grid or []), *(more or [])], changes or [], out=out, jobs=jobs, engine=engine, retries=retries,
            options=options or [], quiet=as_json,
        )  # fmt: skip
        if as_json:
            typer.echo(json_line(found))
        if any(run["state"] != "done" for run in found["runs"]):
            raise typer.Exit(1)


@app.command(short_help="Spectra of the weights in a checkpoint; no data needed.")
def analyze(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A file of torch.save, safetensors, TorchScript or numpy; or a folder.", metavar="CHECKPOINT"
        ),
    ],
    convention: Annotated[
        str, typer.Option(help='"gramscope", or "weightwatcher" for the numbers of that tool.')
    ] = "gramscope",
    out: Annotated[Path | None, typer.Option(help="Write the whole table as CSV.")] = None,
    as_json: Json = False,
) -> None:
    """Example:  gramscope analyze model.safetensors --out spectra.csv

    Spectra of the weights in a checkpoint: tail exponents and ranks. What was skipped is named. No data needed.

    No code in the file is run. A file that cannot be read without running code is refused, with the reason.
    """
    with _explained(as_json):
        from gramscope.cli.analyze_command import analyze_checkpoint

        analyze_checkpoint(checkpoint, convention, out, as_json)


@app.command(short_help="Check every number on your own model against plain autograd.")
def verify(
    target: Annotated[
        str | None,
        typer.Argument(
            help="module:callable or file.py:callable that returns (model, x); if left out, a small built-in model.",
            metavar="TARGET",
        ),
    ] = None,
    examples: Annotated[
        int, typer.Option(min=2, help="How many examples; each output of each costs a backward pass.")
    ] = 4,
    as_json: Json = False,
) -> None:
    """Example:  gramscope verify my_models.py:build

    Compare kernels, steps and fields of your model with plain autograd, and print the errors.

    Exit code 1 if an error is larger than allowed.
    """
    with _explained(as_json):
        from gramscope.cli.verify_command import default_target, load, print_checks
        from gramscope.cli.verify_command import verify as check

        model, x = load(target) if target else default_target()
        findings = check(model, x, examples, tell=None if as_json else lambda text: typer.echo(text, err=True))
        if as_json:
            typer.echo(json_line([{**vars(f), "passed": f.passed} for f in findings]))
        else:
            print_checks(findings)
        if not all(finding.passed for finding in findings):
            raise typer.Exit(1)


@app.command(short_help="Write the tangent kernel of a data set to disk.")
def kernel(
    config: Annotated[
        str,
        typer.Argument(
            help="A TOML file as for run (its data and model), or file.py:callable that returns (model, x).",
            metavar="CONFIG",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the kernel. A kernel that was begun there is completed.")],
    reduce: Annotated[str, typer.Option(help='"trace" sums over the outputs, "none" keeps them.')] = "trace",
    examples: Annotated[
        int | None, typer.Option(min=1, help="Take this many examples, from the first; all if left out.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help='For each process, e.g. "20GB"; half of what is free if left out.')
    ] = None,
    tile: Annotated[int | None, typer.Option(min=1, help="Examples on each side of a tile.")] = None,
    weights: Annotated[Path | None, typer.Option(help="A checkpoint to load into the model first.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a GPU for each process if there are any.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="float64, float32, tf32 or split.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key of the TOML file.", metavar="KEY=VALUE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Example:  gramscope kernel mnist.toml --out K/

    Write the tangent kernel of a model on a data set to a folder, tile by tile.

    Several processes with the same command share the work. After a kill, the same command goes on. On eight GPUs:
    torchrun --nproc-per-node 8 -m gramscope kernel mnist.toml --out K/
    """
    with _explained(as_json):
        from gramscope.cli.kernel_command import write_kernel

        found = write_kernel(
            config, out, changes=changes or [], weights=weights, reduce=reduce, examples=examples, memory=memory,
            tile=tile, device=device, precision=precision, quiet=as_json,
        )  # fmt: skip
        if as_json:
            typer.echo(json_line(found))


@app.command(short_help="One offline page about one or several runs.")
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders written by gs.watch, folders of such runs, or patterns in quotes.", metavar="RUN"),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    svg: Annotated[
        Path | None, typer.Option(help="Also write every figure as an SVG file into this folder (needs matplotlib).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Example:  gramscope report runs/a runs/b -o report.html;  gramscope report runs/

    One file about one or several runs: findings in words, and a panel for each measure. It opens offline.

    Up to eight runs are drawn in full. More runs get a table to sort and filter, with small drawings.
    """
    with _explained(as_json):
        from gramscope.report import report as write_report

        page = write_report(runs, out=out, svg_dir=svg)
        typer.echo(json_line({"report": str(page)}) if as_json else f"Report: {page}")


@app.command(short_help="What is wrong with a run, and what to try first.")
def diagnose(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders written by gs.watch, folders of such runs, or patterns in quotes.", metavar="RUN"),
    ],
    as_json: Json = False,
) -> None:
    """Example:  gramscope diagnose runs/a;  gramscope diagnose runs/ --json

    What is wrong with a run, and what to try first. The likeliest cause comes first, with the numbers behind it.
    """
    with _explained(as_json):
        from gramscope.diagnose.run_diagnosis import diagnose_all

        found = diagnose_all(runs)
        typer.echo(json_line([one.json() for one in found]) if as_json else "\n\n".join(map(str, found)))


@app.command(short_help="The report of a run that still grows, live in a browser.")
def serve(
    folder: Annotated[
        Path, typer.Argument(help="A run that may still be growing, or a folder of runs.", metavar="RUN")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")] = 0,
    as_json: Json = False,
) -> None:
    """Example:  gramscope serve runs/a;  gramscope serve runs/

    The report of a run, or of all runs in a folder, live, on this machine only. Stop it with Ctrl-C.

    Runs that begin later in the folder appear on the page by themselves.
    """
    with _explained(as_json):
        from gramscope.report import serve as serve_run

        with serve_run(folder, port=port) as server:
            typer.echo(json_line({"url": server.url}) if as_json else f"Live report: {server.url}  (Ctrl-C ends it)")
            server.wait()


@app.command(short_help="A published table or figure, computed again.")
def reproduce(
    name: Annotated[str, typer.Argument(help='An experiment, or "list" for all of them.', metavar="NAME")],
    quick: Annotated[
        bool, typer.Option("--quick", metavar="", help="A small version, in a minute or two, without data.")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds for each case; if left out, as the experiment says.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time, each with one thread.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of results. What is done there is kept.")
    ] = None,
    experiments: Annotated[Path | None, typer.Option(help="The folder experiments/ of the source.")] = None,
    publish: Annotated[
        bool,
        typer.Option(
            "--publish", metavar="", help="Also write table, figure and RESULT.md into the experiment's folder."
        ),
    ] = False,
    only_write: Annotated[
        bool, typer.Option("--only-write", metavar="", help="Run nothing: write the result of the jobs that are done.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Example:  gramscope reproduce list;  gramscope reproduce decay --quick

    Compute a published table again: the published number, ours with its interval, and whether they agree.

    Called again, it does only the jobs that are not done.

    Exit code 1 if a job failed. A number that differs is a result, not a failure.
    """
    with _explained(as_json):
        from gramscope.reproduce.command import list_experiments
        from gramscope.reproduce.command import reproduce as repeat

        if name == "list":
            found = list_experiments(experiments, as_json)
        else:
            found = repeat(
                name, experiments=experiments, quick=quick, seeds=seeds, device=device, jobs=jobs, out=out,
                publish=publish, only_write=only_write, quiet=as_json,
            )  # fmt: skip
        if as_json:
            typer.echo(json_line(found))
        if found.get("failed"):
            raise typer.Exit(1)


@app.command(name="help", hidden=True)
def show_help(context: typer.Context) -> None:
    """Show the commands."""
    typer.echo(context.parent.get_help() if context.parent else "")


@contextmanager
def _explained(as_json: bool) -> Iterator[None]:
    """Our own errors and those of the disk as one line (or one JSON object) and exit code 2; anything else as it is."""
    try:
        yield
    except BrokenPipeError:  # a reader that went away (| head) is nobody's mistake; typer ends quietly on it
        raise
    except (GramscopeError, OSError, ImportError) as error:
        typer.echo(json_line({"error": str(error)}) if as_json else f"Error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
