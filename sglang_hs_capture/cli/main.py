"""The entry point: commands, and errors as one line with an exit code of their own."""

import os
import sys
from collections.abc import Sequence

import typer

from sglang_hs_capture import __version__
from sglang_hs_capture.cli import demo, doctor, export, inspect, merge, prepare, prepare_data, run, serve, verify
from sglang_hs_capture.errors import HsCaptureError
from sglang_hs_capture.text import printable

DEBUG_VARIABLE = "HS_CAPTURE_DEBUG"
# What follows -- is SGLang's; only these commands start a server.
WITH_SGLANG_FLAGS = ("run", "serve", "demo", "verify")

app = typer.Typer(
    name="hs-capture",
    help="Capture hidden states from SGLang at full prefill speed.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(run.run)
app.command()(serve.serve)
app.command()(prepare.prepare)
app.command()(prepare_data.prepare_data)
app.command()(inspect.inspect)
app.command()(verify.verify)
app.command()(export.export)
app.command()(merge.merge)
app.command()(demo.demo)
app.command()(doctor.doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sglang-hs-capture {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    """Capture hidden states from SGLang at full prefill speed."""


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the command line at the first ``--``: this program's arguments, and SGLang's."""
    if "--" not in argv:
        return list(argv), []
    place = list(argv).index("--")
    return list(argv[:place]), list(argv[place + 1 :])


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    A foreseen error is told in one line; ``HS_CAPTURE_DEBUG=1`` shows where it came from. Any other error keeps its
    traceback.
    """
    ours, theirs = split(sys.argv[1:] if argv is None else argv)
    try:
        if theirs and not any(word in WITH_SGLANG_FLAGS for word in ours[:1]):
            sys.exit(f"error: flags after '--' go to SGLang, which only {', '.join(WITH_SGLANG_FLAGS)} start")
        app(args=ours, prog_name="hs-capture", obj=theirs)
    except HsCaptureError as error:
        if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
            raise
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
