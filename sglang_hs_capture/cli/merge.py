"""``hs-capture merge``: datasets that were captured apart, joined into one."""

from pathlib import Path
from typing import Annotated

import typer

from sglang_hs_capture.cli.tell import tell
from sglang_hs_capture.driver.summary import count_of
from sglang_hs_capture.store.merge import merge as merge_datasets


def merge(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The dataset to make; it must not exist, or be empty.")],
    datasets: Annotated[list[Path], typer.Argument(metavar="DATASET...", help="The datasets to join.")],
) -> None:
    """Join datasets of one model and the same settings, as several nodes have captured them on disks of their own.

    Shards on OUT's own file system are linked and take no room, those on others are copied. The datasets stay as they
    are. A sample that several of them hold counts once. Run the same command again to go on after an interruption.
    """
    done = merge_datasets(out.expanduser(), [path.expanduser() for path in datasets], tell)
    tell(
        f"{out}: {count_of(done.samples, 'sample')}, {done.duplicates:,} of them more than once; "
        f"{count_of(done.shards, 'shard')}, {done.copied:,} of them copied."
    )
