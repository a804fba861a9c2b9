"""What a command says: names and reasons in it come from files and servers, and must not move a terminal."""

import typer

from sglang_hs_capture.text import printable


def tell(text: str, *, err: bool = False) -> None:
    """Print one line of text, as no terminal obeys it, to stdout or stderr."""
    typer.echo(printable(text), err=err)
