"""``gramscope``: the commands. Heavy imports happen inside them, so that ``--help`` answers at once."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import gramscope
from gramscope.base.errors import GramscopeError
from gramscope.cli.printed import json_line

if TYPE_CHECKING:
    from gramscope.cli.verify_command import IdentityCheck

app = typer.Typer(
    name="gramscope",
    help="See how a neural network learns, layer by layer.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def _version(show: bool | None) -> None:
    if show:
        typer.echo(f"gramscope {gramscope.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool | None, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = None,
) -> None:
    """See how a neural network learns, layer by layer.

    Begin with [bold]gramscope demo[/bold]. In your own training loop, [bold]gs.watch[/bold] writes a run;
    [bold]report[/bold] and [bold]serve[/bold] show it, [bold]analyze[/bold] needs only a checkpoint,
    [bold]verify[/bold] checks every number on your own model.
    """


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for runs and report.")] = Path("gramscope-demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 400,
    width: Annotated[int, typer.Option(min=1, help="Width of the hidden layers.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of weights and data order.")] = 0,
    as_json: Json = False,
) -> None:
    """Train one network on digits twice, in the rich and in the lazy regime, and compare the two.

    Example:  gramscope demo --steps 1000 --out my-demo
    """
    from gramscope.cli.demo import run

    with _explained(as_json):
        run(out, steps, width, seed, as_json)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A TOML file; see docs/cli.md for all keys.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override one key, e.g. --set optimiser.lr=0.01", metavar="KEY=VALUE"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train and watch what a config file describes: data set, model, optimiser, schedule, measures.

    Example:  gramscope run experiment.toml --set train.steps=2000 --set model.width=256
    """
    with _explained(as_json):
        from gramscope.cli.config import run_config

        found = run_config(config, changes or [], quiet=as_json)
        if as_json:
            typer.echo(json_line(found))


@app.command()
def sweep(
    config: Annotated[Path, typer.Argument(help="A TOML file, as for gramscope run.")],
    more: Annotated[list[str] | None, typer.Argument(help="More of the grid.", metavar="[KEY=VALUES]...")] = None,
    grid: Annotated[
        list[str] | None, typer.Option(help="Values of a key, e.g. lr=1e-3,1e-2", metavar="KEY=VALUES")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the sweep; the same again goes on.")] = Path(
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
    """Train and watch one run for every combination of a grid; runs that are done are not done again.

    Exit code 1 if a run failed. All runs on one page: gramscope report SWEEP.

    Example:  gramscope sweep experiment.toml --grid lr=1e-3,1e-2 width=64,256 --jobs 4 --out sweep
    """
    with _explained(as_json):
        from gramscope.cli.sweep import sweep_config

        found = sweep_config(
            config, [*(grid or []), *(more or [])], changes or [], out=out, jobs=jobs, engine=engine, retries=retries,
            options=options or [], quiet=as_json,
        )  # fmt: skip
        if as_json:
            typer.echo(json_line(found))
        if any(run["state"] != "done" for run in found["runs"]):
            raise typer.Exit(1)


@app.command()
def analyze(
    checkpoint: Annotated[
        Path, typer.Argument(help="A file of torch.save, safetensors, TorchScript or numpy; or a folder.")
    ],
    convention: Annotated[str, typer.Option(help='"gramscope", or "weightwatcher" for its numbers.')] = "gramscope",
    out: Annotated[Path | None, typer.Option(help="Write the whole table as CSV.")] = None,
    as_json: Json = False,
) -> None:
    """Spectra of the weights in a checkpoint: tail exponent, ranks, what was skipped and why. No data needed.

    No code that a file may hold is run: what cannot be read without is refused, with the reason.

    Example:  gramscope analyze model.safetensors --out spectra.csv
    """
    with _explained(as_json):
        from gramscope.cli.analyze_command import analyze_checkpoint

        analyze_checkpoint(checkpoint, convention, out, as_json)


@app.command()
def verify(
    target: Annotated[
        str | None,
        typer.Argument(help="module:callable or file.py:callable that returns (model, x); a built-in if left out."),
    ] = None,
    examples: Annotated[int, typer.Option(min=2, help="Examples to check on; each output costs a backward pass.")] = 4,
    as_json: Json = False,
) -> None:
    """Check all identities on your model against plain autograd, and print the errors. Exit code 1 if one fails.

    Example:  gramscope verify my_models.py:build
    """
    with _explained(as_json):
        from gramscope.cli.verify_command import default_target, load
        from gramscope.cli.verify_command import verify as check

        model, x = load(target) if target else default_target()
        findings = check(model, x, examples)
        if as_json:
            typer.echo(json_line([{**vars(f), "passed": f.passed} for f in findings]))
        else:
            _print_findings(findings)
        if not all(finding.passed for finding in findings):
            raise typer.Exit(1)


@app.command()
def kernel(
    config: Annotated[
        str,
        typer.Argument(help="A TOML file as for run (its data and model), or file.py:callable that gives (model, x)."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the kernel; one that was begun is completed.")],
    reduce: Annotated[str, typer.Option(help='"trace" sums over the outputs, "none" keeps them.')] = "trace",
    examples: Annotated[int | None, typer.Option(min=1, help="The first so many examples; all if left out.")] = None,
    memory: Annotated[
        str | None, typer.Option(help='For each process, e.g. "20GB"; half of what is free if left out.')
    ] = None,
    tile: Annotated[int | None, typer.Option(min=1, help="Examples of a tile on either side.")] = None,
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
    """Write the tangent kernel of a model on a data set to a folder, tile by tile.

    The same command in several processes shares the work; after a kill it goes on where it was.

    Example:  torchrun --nproc-per-node 8 -m gramscope kernel mnist.toml --out K/
    """
    with _explained(as_json):
        from gramscope.cli.kernel_command import write_kernel

        found = write_kernel(
            config, out, changes=changes or [], weights=weights, reduce=reduce, examples=examples, memory=memory,
            tile=tile, device=device, precision=precision, quiet=as_json,
        )  # fmt: skip
        if as_json:
            typer.echo(json_line(found))


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders written by gs.watch, folders that hold some, or patterns (quoted).")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    svg: Annotated[Path | None, typer.Option(help="Also write every figure as an SVG file into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """One self-contained page about one or several runs; it opens offline and can be sent by mail.

    Up to eight runs are drawn in full; of more there is a table to sort and filter, with small drawings.

    Example:  gramscope report runs/a runs/b -o report.html;  gramscope report runs/
    """
    with _explained(as_json):
        from gramscope.report import report as write_report

        page = write_report(runs, out=out, svg_dir=svg)
        typer.echo(json_line({"report": str(page)}) if as_json else f"Report: {page}")


@app.command()
def diagnose(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders written by gs.watch, folders that hold some, or patterns (quoted).")
    ],
    as_json: Json = False,
) -> None:
    """What is wrong with a run and what to try first: findings with their evidence, the likeliest cause first.

    Example:  gramscope diagnose runs/a;  gramscope diagnose runs/ --json
    """
    with _explained(as_json):
        from gramscope.diagnose.opening import diagnose_all

        found = diagnose_all(runs)
        typer.echo(json_line([one.json() for one in found]) if as_json else "\n\n".join(map(str, found)))


@app.command()
def serve(
    folder: Annotated[
        Path, typer.Argument(help="A run that may still be growing, or a folder of runs.", metavar="RUN")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")] = 0,
    as_json: Json = False,
) -> None:
    """The report of a run, or of all runs in a folder, live, on this machine only. Stop it with Ctrl-C.

    Runs that begin later in the folder appear on the page by themselves.

    Example:  gramscope serve runs/a;  gramscope serve runs/
    """
    with _explained(as_json):
        from gramscope.report import serve as serve_run

        with serve_run(folder, port=port) as server:
            typer.echo(json_line({"url": server.url}) if as_json else f"Live report: {server.url}  (Ctrl-C ends it)")
            server.wait()


@app.command(name="help", hidden=True)
def show_help(context: typer.Context) -> None:
    """Show the commands."""
    typer.echo(context.parent.get_help() if context.parent else "")


class _explained:
    """Our own errors and those of the disk as one line (or one JSON object) and exit code 2; anything else as it is."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # A reader that went away (| head) is nobody's mistake; typer ends quietly on it.
        if isinstance(error, GramscopeError | OSError) and not isinstance(error, BrokenPipeError):
            message = str(error)
            typer.echo(json_line({"error": message}) if self.as_json else f"Error: {message}", file=sys.stderr)
            raise typer.Exit(2) from error


def _print_findings(findings: "list[IdentityCheck]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Identities on this model, in float64", title_justify="left")
    for heading in ("identity", "error", "allowed", ""):
        table.add_column(heading, justify="left" if heading in ("identity", "") else "right")
    for f in findings:
        verdict = (
            "[yellow]skipped[/yellow]"
            if f.error is None
            else "[green]holds[/green]"
            if f.passed
            else "[red]FAILS[/red]"
        )
        table.add_row(f.name, "" if f.error is None else f"{f.error:.1e}", f"{f.allowed:.0e}", verdict)
    console = Console()
    console.print(table)
    for note in dict.fromkeys(f"{f.name}: {f.note}" if f.error is None else f.note for f in findings if f.note):
        console.print(note, style="dim", markup=False)


if __name__ == "__main__":
    app()
