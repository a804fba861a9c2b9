"""The entry point: commands, and errors as one line with an exit code of their own."""

import errno
import os
import sys
from collections.abc import Sequence

import typer

from sglang_hs_capture import __version__
from sglang_hs_capture.cli import demo, doctor, export, inspect, merge, prepare, prepare_data, run, serve, verify
from sglang_hs_capture.errors import ConfigError, HsCaptureError
from sglang_hs_capture.text import printable

DEBUG_VARIABLE = "HS_CAPTURE_DEBUG"
# Where the system refuses a path before it is known what it leads to, and what to do.
_OF_PATHS = {
    errno.EACCES: "let this user look into the directories above it, or name another path",
    errno.ENAMETOOLONG: "name a shorter path",
}
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


def _foreseen(error: HsCaptureError | OSError) -> HsCaptureError | None:
    """What is told in one line; None for an error that nobody foresaw."""
    if isinstance(error, HsCaptureError):
        return error
    if not isinstance(error.filename, str) or error.errno not in _OF_PATHS:
        return None
    return ConfigError(f"{error.filename}: {os.strerror(error.errno)}; {_OF_PATHS[error.errno]}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    A foreseen error is told in one line, and so is a path that the system refuses to look at, wherever it was given;
    ``HS_CAPTURE_DEBUG=1`` shows where it came from. Any other error keeps its traceback.
    """
    ours, theirs = split(sys.argv[1:] if argv is None else argv)
    try:
        if theirs and not any(word in WITH_SGLANG_FLAGS for word in ours[:1]):
            sys.exit(f"error: flags after '--' go to SGLang, which only {', '.join(WITH_SGLANG_FLAGS)} start")
        app(args=ours, prog_name="hs-capture", obj=theirs)
    except (HsCaptureError, OSError) as error:
        told = _foreseen(error)
        if told is None or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
            raise
        print(f"error: {printable(str(told))}", file=sys.stderr)
        sys.exit(told.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
