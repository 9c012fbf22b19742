"""``gramscope``: the commands. Heavy imports happen inside them, so that ``--help`` answers at once."""

from pathlib import Path
from typing import Annotated

import typer

import gramscope

app = typer.Typer(
    name="gramscope",
    help="See how a neural network learns, layer by layer.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


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
    """See how a neural network learns, layer by layer."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("gramscope-demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 400,
    width: Annotated[int, typer.Option(min=1, help="Width of the hidden layers.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of weights and data order.")] = 0,
) -> None:
    """Train a small network on handwritten digits and watch which layer learns.

    At a few moments of the training the exact tangent kernel of a probe of 100 digits is computed. It tells how the
    next step's decrease of the loss is shared among the layers, how far the kernel has moved since the start (near 1:
    lazy learning, the features stay as they were; well below 1: rich learning), and how well it fits the labels.
    """
    from gramscope.cli.demo import run

    run(out, steps, width, seed)


@app.command(name="help", hidden=True)
def show_help(context: typer.Context) -> None:
    """Show the commands."""
    typer.echo(context.parent.get_help() if context.parent else "")


if __name__ == "__main__":
    app()
