"""Everything that reads a dataset, for tests of what its files may hold."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import made_dataset

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.cli import inspect
from sglang_hs_capture.driver.watch import JournalWatch
from sglang_hs_capture.errors import HsCaptureError
from sglang_hs_capture.store.index import load_index
from sglang_hs_capture.store.recovery import recover_dataset
from sglang_hs_capture.store.requests import RequestLedger
from sglang_hs_capture.text import printable
from sglang_hs_capture.verify.check import CheckSettings, CheckView, check_dataset


def open_reader(directory: Path) -> None:
    dataset = HiddenStateDataset(directory)
    for place in range(len(dataset)):
        try:
            item = dataset[place]
        except HsCaptureError:
            continue
        number = item["id"].removeprefix("s")
        if number.isdigit() and int(number) < len(made_dataset.LENGTHS):
            tokens = made_dataset.tokens_of(int(number), made_dataset.LENGTHS[int(number)])
            assert item["input_ids"].tolist() == tokens.tolist()
        assert len(item["loss_mask"]) == len(item["input_ids"])
    dataset.final_norm()


def follow(directory: Path) -> None:
    JournalWatch(directory).poll()


def show(directory: Path) -> None:
    account = inspect.describe(directory, load_index(directory))
    json.dumps(account)
    assert all(printable(line).isprintable() for line in inspect.lines(account))


def check(directory: Path) -> None:
    result = check_dataset(directory, CheckSettings(threads=1), CheckView())
    json.dumps(result.to_json())
    assert all(str(finding).isprintable() for finding in result.findings.listed())


def go_on(directory: Path) -> None:
    RequestLedger.open(directory, lock_timeout_s=0.0).close()


def recover(directory: Path) -> None:
    recover_dataset(directory, lock_timeout_s=0.0)


READERS: tuple[Callable[[Path], None], ...] = (open_reader, follow, show, check, go_on, recover)


def read_with_all(directory: Path) -> None:
    """Read a dataset in every way; any error but this project's own is raised."""
    for reader in READERS:
        with suppress(HsCaptureError):
            reader(directory)
