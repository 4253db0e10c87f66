# SPDX-License-Identifier: Apache-2.0
"""The `equipoise` command: what it offers, and how it fails.

A command is a function in `_<command>.py`, and one line at the end of this file. Whatever a
command needs beyond typer and rich is imported inside it, so that help appears at once.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from equipoise import __version__
from equipoise_lab.cli import _bench
from equipoise_lab.cli._audit import audit
from equipoise_lab.cli._compare import compare
from equipoise_lab.cli._demo import demo
from equipoise_lab.cli._reproduce import reproduce
from equipoise_lab.cli._warmup import warmup

_HELP = """Exact balanced assignment for sparse mixtures of experts.

In Python, use the library with `import equipoise as eq`. This command runs its experiments. Each experiment writes its
results into a folder (`--out`): numbers as JSON, figures as SVG and PNG. To begin, run `equipoise demo`.
"""

_BENCH_HELP = """Measure speed against the alternatives, all in one run on this machine.

Compare ratios, not milliseconds: a time depends on the machine, a ratio within one run depends on it much less.
"""

# Commands inherit it from the group.
_SHORT_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="equipoise",
    help=_HELP,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings=_SHORT_HELP,
)
bench = typer.Typer(help=_BENCH_HELP, rich_markup_mode="markdown")
app.add_typer(bench, name="bench")


def _show_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"equipoise {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]  (typer calls it)
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="On an error, show the full traceback.")] = False,
) -> None:
    del version, traceback  # the first acts in its callback, the second in main


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0 when all went well, 2 after an error of the user, 130 when interrupted.

    An error of the user (a bad option, a value that is refused, a folder that cannot be written) is one line on the
    error stream.

    Args:
        arguments: what follows the program's name; None takes it from the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given in [[group.name] for group in app.registered_groups]:
        given.append("--help")
    try:
        status = app(args=given, prog_name="equipoise", standalone_mode=False)
    except typer.TyperException as error:
        _fail(error.format_message())
    except (ValueError, OSError) as error:
        if "--traceback" in given:
            raise
        _fail(f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error))
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> NoReturn:
    typer.echo(f"equipoise: error: {' '.join(message.split())}", err=True)
    sys.exit(2)


app.command("demo")(demo)
app.command("reproduce")(reproduce)
app.command("audit")(audit)
app.command("compare")(compare)
app.command("warmup")(warmup)
bench.command("assign")(_bench.assign)
bench.command("balance")(_bench.balance)
bench.command("layer")(_bench.layer)
bench.command("scale")(_bench.scale)
bench.command("sinkhorn")(_bench.sinkhorn)
