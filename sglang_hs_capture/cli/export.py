"""``hs-capture export``: a dataset as the files that a trainer reads."""

import os
from pathlib import Path
from typing import Annotated

import typer

from sglang_hs_capture.cli.check_view import make_check_view
from sglang_hs_capture.cli.tell import tell
from sglang_hs_capture.driver.summary import GB
from sglang_hs_capture.export.options import ExportDtype, ExportOptions, ExportResult, Format

MOST_WORKERS = 8


def export(
    directory: Annotated[Path, typer.Argument(metavar="DATASET", help="The dataset.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A directory of its own; created, or gone on with.")],
    *,
    layout: Annotated[Format, typer.Option("--format", help="The layout, by the trainer that reads it.")],
    dtype: Annotated[
        ExportDtype | None,
        typer.Option(help="The dtype of the states.", show_default="bfloat16; for safetensors as captured"),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, max=256, help="Threads that read and write.", show_default=f"processors, to {MOST_WORKERS}"
        ),
    ] = None,
    min_loss_tokens: Annotated[
        int, typer.Option(min=0, help="Leave out samples with fewer tokens that the loss is on.")
    ] = 0,
    verifier: Annotated[
        Path | None,
        typer.Option(help="The directory of the model that was captured; --draft-vocab-size needs it."),
    ] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Choose a vocabulary of so many tokens for the draft model.")
    ] = None,
) -> None:
    """Write a dataset as the files that a trainer reads.

    Run the same command again to go on after an interruption, or to add what was captured since.
    """
    from sglang_hs_capture.export.run import export_dataset

    out = out.expanduser()
    options = ExportOptions(
        format=layout,
        dtype=dtype,
        workers=workers or min(MOST_WORKERS, os.cpu_count() or 1),
        min_loss_tokens=min_loss_tokens,
        verifier=verifier and verifier.expanduser(),
        draft_vocab_size=draft_vocab_size,
    )
    with make_check_view() as view:
        result = export_dataset(directory.expanduser(), out, options, view)
    for line in lines(out, layout, result):
        tell(line)


def lines(out: Path, layout: Format, result: ExportResult) -> list[str]:
    """The result for a person."""
    ids = result.layer_ids
    shown = [
        f"Export       {out}, format {layout.value}",
        f"Samples      {result.samples:,} ({result.tokens:,} tokens), {result.written:,} written now: "
        f"{result.bytes_written / GB:.3f} GB in {result.seconds:.1f} s",
        f"Layer ids    {ids['aux']}, final {ids['final']} (convention {ids['convention']})",
        f"Final state  {ids['final_form']}",
    ]
    if result.left_out:
        shown.append(f"Left out     {result.left_out:,} samples with too few tokens that the loss is on")
    return shown
