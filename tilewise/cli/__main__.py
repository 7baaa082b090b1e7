"""The command line: ``tilewise COMMAND`` or ``python -m tilewise COMMAND``.

A registry, nothing more: each command lives in its own module, which imports what only it needs
(matplotlib, transformers) when it runs.
"""

import io
import sys

import typer

from tilewise import __version__
from tilewise.cli.bench import bench, help_without_command
from tilewise.cli.demo import demo
from tilewise.cli.describe import cost, explain
from tilewise.cli.doctor import doctor
from tilewise.cli.tune import tune

app = typer.Typer(
    help="Exact attention (FlashAttention) in O(n) memory.",
    rich_markup_mode="markdown",  # which joins the lines of a paragraph
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tilewise {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
    ),
) -> None:
    """Options that come before a command; without one, the help."""
    help_without_command(context)


app.command("demo")(demo)
app.command("cost")(cost)
app.command("explain")(explain)
app.command("doctor")(doctor)
app.command("tune")(tune)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line; a ValueError is one clear line on stderr and exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show √ or 中 shows ? in its place, not a traceback.
            stream.reconfigure(errors="replace")
    try:
        app()
    except ValueError as error:
        typer.echo(f"tilewise: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
