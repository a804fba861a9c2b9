"""Going on after any interruption, growing with the dataset, and what an export refuses to write into."""

import errno
import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import exported_dataset as made
import numpy as np
import pytest
import torch
from exported_dataset import MORE, Watching, content, export, info_of
from faulty_disk import FailAt, FaultyOS, ForgetfulOS, GatedOS, KillAt, PowerLossError, close_all_below, disk
from safetensors.torch import load_file

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.errors import (
    ConfigError,
    CorruptionError,
    DatasetLockedError,
    DatasetMismatchError,
    DiskFullError,
    StoreError,
)
from sglang_hs_capture.export import manifest, run
from sglang_hs_capture.export.options import ExportDtype, ExportOptions, Format
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.journal import encode_line
from sglang_hs_capture.store.requests import RequestLedger

SUFFIX = {"eagle-pt": ".pt", "speculators": ".safetensors", "specforge": ".ckpt", "modelopt": ".pt"}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make(tmp_path_factory.mktemp("template") / "dataset")


@pytest.fixture
def directory(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "dataset"))


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing: the disk's own speed at ``fsync`` is not under test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as name:
        yield Path(name)


def in_child(action) -> int:
    """Run something in a process of its own; how that ended."""
    pid = os.fork()
    if not pid:
        try:
            action()
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def steps_of(directory: Path, out: Path, layout: str) -> int:
    with disk(FaultyOS()) as counted:
        export(directory, out, layout)
    return counted.steps


@pytest.mark.parametrize(("layout", "torn"), [("eagle-pt", False), ("specforge", True), ("safetensors", True)])
def test_killed_at_many_steps(template: Path, in_memory: Path, layout: str, torn: bool) -> None:
    """What has its name is whole, and the next run makes the rest: the same bytes as an undisturbed one."""
    steps = steps_of(template, in_memory / "whole", layout)
    expected = content(in_memory / "whole")
    assert steps > 40
    for step in range(int(torn), steps, 9):
        out = in_memory / f"out-{step}"

        def killed(step: int = step, out: Path = out) -> None:
            with disk(KillAt(step, torn)):
                export(template, out, layout)

        assert os.WTERMSIG(in_child(killed)) == signal.SIGKILL
        left = content(out) if out.exists() else {}
        for name, data in left.items():
            if name.startswith(("data_", "rows_", "sample_")):
                assert data == expected[name], (step, name)
        assert export(template, out, layout).samples == 8
        assert content(out) == expected, step
        assert not (out / manifest.UNFINISHED).exists()


@pytest.mark.parametrize("layout", ["specforge", "modelopt"])
def test_the_power_goes(template: Path, in_memory: Path, layout: str) -> None:
    """Whatever the disk kept of what was not made durable: what has its name is whole, and the rest can be made."""
    steps = steps_of(template, in_memory / "whole", layout)
    expected = content(in_memory / "whole")
    for step in range(3, steps - 3, 9):
        lost = in_memory / f"lost-{step}"
        lost.mkdir()
        with disk(ForgetfulOS(lost, step)) as forgetful, pytest.raises(PowerLossError):
            export(template, lost, layout)
        for state, rng in enumerate((None, random.Random(step))):
            out = in_memory / f"out-{step}-{state}"
            forgetful.materialise(out, rng)
            for path in out.rglob("*"):
                if path.suffix in (".ckpt", ".pt"):
                    assert path.read_bytes() == expected[path.relative_to(out).as_posix()], (step, path.name)
            export(template, out, layout)
            assert content(out) == expected, step
        close_all_below(lost)


def test_killed_while_the_arrow_dataset_is_replaced(directory: Path, in_memory: Path) -> None:
    """At no moment is there an Arrow dataset that is not whole."""
    import datasets

    export(directory, in_memory / "out", "speculators")
    made.add(directory, MORE)
    steps = steps_of(directory, Path(shutil.copytree(in_memory / "out", in_memory / "whole")), "speculators")
    seen = set()
    for step in range(steps - 22, steps, 3):
        out = Path(shutil.copytree(in_memory / "out", in_memory / f"out-{step}"))

        def killed(step: int = step, out: Path = out) -> None:
            with disk(KillAt(step, torn=True)):
                export(directory, out, "speculators")

        assert os.WTERMSIG(in_child(killed)) == signal.SIGKILL
        try:
            rows = datasets.load_from_disk(str(out))
        except FileNotFoundError:
            seen.add("none")
        else:
            seen.add(len(rows))
            assert all((out / "hidden_states" / f"hs_{row}.safetensors").exists() for row in range(len(rows)))
        export(directory, out, "speculators")
        assert len(datasets.load_from_disk(str(out))) == 10
    assert seen == {8, "none", 10}


@pytest.mark.parametrize("layout", [name.value for name in Format])
def test_nothing_is_left_to_do(template: Path, tmp_path: Path, layout: str) -> None:
    out = tmp_path / "out"
    assert export(template, out, layout, workers=2).written == 8
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.name != manifest.LOCK}
    view = Watching()
    again = run.export_dataset(template, out, ExportOptions(format=Format(layout)), view)
    assert (again.samples, again.written, again.bytes_written) == (8, 0, 0)
    assert view.totals == {}
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_progress_comes_to_its_end(template: Path, tmp_path: Path) -> None:
    view = Watching()
    result = run.export_dataset(template, tmp_path / "out", ExportOptions(format=Format.SPECULATORS), view)
    size = result.tokens * 4 * made.HIDDEN * 2
    assert view.totals == {"Export": size, "Tokens": 8}
    assert view.done == view.totals
    assert result.bytes_written == size


def test_a_file_that_was_removed_is_written_again(template: Path, tmp_path: Path) -> None:
    export(template, tmp_path / "out", "eagle-pt")
    expected = content(tmp_path / "out")
    (tmp_path / "out" / "data_3.pt").unlink()
    assert export(template, tmp_path / "out", "eagle-pt").written == 1
    assert content(tmp_path / "out") == expected


@pytest.mark.parametrize("layout", [name.value for name in Format])
def test_a_dataset_that_has_grown(directory: Path, tmp_path: Path, layout: str) -> None:
    """New samples get the next numbers, although the dataset puts them before the one sent by hand."""
    out = tmp_path / "out"
    export(directory, out, layout)
    before = content(out)
    made.add(directory, MORE)
    assert [sample.id for sample in HiddenStateDataset(directory).samples][-1] == made.BY_HAND
    result = export(directory, out, layout)
    assert (result.samples, result.written) == (10, 2)
    after = content(out)
    kept = [name for name in before if name.endswith(SUFFIX.get(layout, ".safetensors")) and "token_freq" not in name]
    assert len(kept) == 8
    assert all(after[name] == before[name] for name in kept)
    if layout == "eagle-pt":
        assert torch.load(out / "data_8.pt", weights_only=True)["input_ids"].tolist() == MORE["more"]
        assert json.loads((out / "sample_lengths.json").read_text())["9"] == 1


def test_a_loss_mask_that_has_changed(directory: Path, tmp_path: Path) -> None:
    import datasets

    out = tmp_path / "out"
    export(directory, out, "eagle-pt")
    export(directory, tmp_path / "rows", "speculators")
    with RequestLedger.open(directory) as ledger:
        made.ask(ledger, "one", made.PROMPTS["one"], [1, 1, 0])
    assert export(directory, out, "eagle-pt").written == 1
    assert torch.load(out / "data_0.pt", weights_only=True)["loss_mask"].tolist() == [1, 1, 0]
    export(directory, tmp_path / "rows", "speculators")
    assert datasets.load_from_disk(str(tmp_path / "rows"))[0]["loss_mask"].tolist() == [1, 1, 0]


def test_a_sample_that_is_gone(directory: Path, tmp_path: Path) -> None:
    export(directory, tmp_path / "out", "eagle-pt")
    (directory / "requests.jsonl").unlink()
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(StoreError, match="the export holds 'one', and the dataset no longer has it"),
    ):
        export(directory, tmp_path / "out", "eagle-pt")


def test_few_loss_tokens(template: Path, tmp_path: Path) -> None:
    everything = export(template, tmp_path / "all", "eagle-pt")
    assert (everything.samples, everything.left_out) == (8, 0)
    result = export(template, tmp_path / "out", "eagle-pt", min_loss_tokens=2)
    kept = [sample for sample in HiddenStateDataset(template).samples if sample.loss_tokens >= 2]
    assert (result.samples, result.left_out) == (len(kept), 8 - len(kept))
    assert 0 < len(kept) < 8
    for number, sample in enumerate(kept):
        found = torch.load(tmp_path / "out" / f"data_{number}.pt", weights_only=True)
        assert int(found["loss_mask"].sum()) == sample.loss_tokens
        assert len(found["input_ids"]) == sample.length
    with pytest.raises(StoreError, match="nothing to export: of 8 samples none has 1000 tokens"):
        export(template, tmp_path / "none", "eagle-pt", min_loss_tokens=1000)


def test_an_empty_dataset(tmp_path: Path) -> None:
    made.open_store(tmp_path / "dataset", info=info_of()).close()
    with pytest.raises(StoreError, match="nothing to export: of 0 samples"):
        export(tmp_path / "dataset", tmp_path / "out", "eagle-pt")


def test_what_was_acknowledged_while_it_is_still_captured(tmp_path: Path) -> None:
    store = made.open_store(tmp_path / "dataset", info=info_of())
    extents, end = made.append_tokens(store, [4, 5])
    store.add_sample("hs-b", 2, extents, end)
    store.commit()
    result = export(tmp_path / "dataset", tmp_path / "out", "safetensors")
    assert result.samples == 1
    store.close()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layout": "modelopt"}, "format: 'eagle-pt' there, 'modelopt' now"),
        ({"layout": "safetensors"}, "format: 'eagle-pt' there, 'safetensors' now"),
        ({"dtype": ExportDtype.FLOAT32}, "dtype: 'bfloat16' there, 'float32' now"),
        ({"min_loss_tokens": 1}, "min_loss_tokens: 0 there, 1 now"),
    ],
)
def test_another_export_is_refused(template: Path, tmp_path: Path, changes: dict, named: str) -> None:
    export(template, tmp_path / "out", "eagle-pt")
    before = content(tmp_path / "out")
    with pytest.raises(DatasetMismatchError) as refused:
        export(template, tmp_path / "out", **{"layout": "eagle-pt", **changes})
    assert named in str(refused.value)
    assert "layer_ids" not in str(refused.value), "they follow from the format"
    assert content(tmp_path / "out") == before


def test_another_dataset_is_refused(template: Path, tmp_path: Path) -> None:
    other = made.make(tmp_path / "other", made.make_info(**{**vars(info_of()), "created_at": "2026-01-01T00:00:00Z"}))
    export(template, tmp_path / "out", "eagle-pt")
    with pytest.raises(DatasetMismatchError, match=r"dataset: .*2025-01-31.* there, .*2026-01-01.* now"):
        export(other, tmp_path / "out", "eagle-pt")


def test_a_dataset_that_was_moved_is_the_same(directory: Path, tmp_path: Path) -> None:
    export(directory, tmp_path / "out", "eagle-pt")
    directory.rename(tmp_path / "moved")
    assert export(tmp_path / "moved", tmp_path / "out", "eagle-pt").written == 0


@pytest.mark.parametrize("there", ["data_0.pt", "notes.txt", ".hidden"])
def test_a_folder_with_something_else_is_refused(template: Path, tmp_path: Path, there: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / there).write_text("mine")
    with pytest.raises(StoreError, match=f"expected an empty directory or an export; it holds '{there}'"):
        export(template, out, "eagle-pt")
    assert content(out) == {there: b"mine"}
    assert [path.name for path in out.iterdir()] == [there]


def test_a_file_in_the_place_of_the_folder(template: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(StoreError, match="expected an empty directory or an export"):
        export(template, tmp_path / "out", "eagle-pt")


def test_an_empty_folder_is_taken(template: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert export(template, tmp_path / "out", "eagle-pt").samples == 8


def test_not_into_the_dataset(template: Path) -> None:
    for out in (template, template / "export", template / "shards" / ".." / "x"):
        with pytest.raises(ConfigError, match="expected a directory outside of the dataset"):
            export(template, out, "eagle-pt")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", CorruptionError),
        ('{"kind": "something else", "version": 1}', StoreError),
        ('{"kind": "sglang-hs-capture export", "version": 2}', StoreError),
    ],
)
def test_a_manifest_that_cannot_be_read(template: Path, tmp_path: Path, text: str, error: type) -> None:
    export(template, tmp_path / "out", "eagle-pt")
    (tmp_path / "out" / manifest.MANIFEST).write_text(text)
    with pytest.raises(error):
        export(template, tmp_path / "out", "eagle-pt")


@pytest.mark.parametrize("numbered", ["8", None, [8], True])
def test_a_manifest_with_a_number_that_is_none(template: Path, tmp_path: Path, numbered: object) -> None:
    export(template, tmp_path / "out", "eagle-pt")
    path = tmp_path / "out" / manifest.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"numbered": numbered}))
    with pytest.raises(CorruptionError, match=r"export\.json: numbered: expected a number of samples"):
        export(template, tmp_path / "out", "eagle-pt")


@pytest.mark.parametrize("id", [5, ["one"], None])
def test_a_list_of_samples_with_an_id_that_is_none(template: Path, tmp_path: Path, id: object) -> None:
    export(template, tmp_path / "out", "eagle-pt")
    path = tmp_path / "out" / manifest.SAMPLES
    record = {"t": "exported", "id": id, "length": 3, "end_hash": "00", "loss_mask": "x"}
    path.write_bytes(encode_line(record) + b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    with pytest.raises(CorruptionError, match="line 1: not a sample's record"):
        export(template, tmp_path / "out", "eagle-pt")


def test_a_folder_in_the_place_of_a_file_is_not_taken_for_it(template: Path, tmp_path: Path) -> None:
    export(template, tmp_path / "out", "eagle-pt")
    (tmp_path / "out" / "data_0.pt").unlink()
    (tmp_path / "out" / "data_0.pt").mkdir()
    with pytest.raises(StoreError, match="Is a directory"):
        export(template, tmp_path / "out", "eagle-pt")


def test_a_damaged_list_of_samples(template: Path, tmp_path: Path) -> None:
    export(template, tmp_path / "out", "eagle-pt")
    path = tmp_path / "out" / manifest.SAMPLES
    path.write_bytes(path.read_bytes().replace(b'"length":3', b'"length":4', 1))
    with pytest.raises(CorruptionError, match="line 1"):
        export(template, tmp_path / "out", "eagle-pt")


@pytest.mark.parametrize("left", [0, 3])
def test_a_list_of_samples_that_was_cut(template: Path, tmp_path: Path, left: int) -> None:
    """The files are there, and nobody can say whose they are."""
    export(template, tmp_path / "out", "eagle-pt")
    path = tmp_path / "out" / manifest.SAMPLES
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:left]))
    with pytest.raises(CorruptionError, match=f"expected 8 samples or more, got {left}"):
        export(template, tmp_path / "out", "eagle-pt")


def test_an_interrupt(template: Path, tmp_path: Path) -> None:
    class Interrupting(Watching):
        def advance(self, amount: int) -> None:
            super().advance(amount)
            if self.done["Export"] > self.totals["Export"] / 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.export_dataset(template, tmp_path / "out", ExportOptions(format=Format.EAGLE_PT), Interrupting())
    assert not (tmp_path / "out" / manifest.UNFINISHED).exists()
    assert export(template, tmp_path / "out", "eagle-pt").samples == 8
    export(template, tmp_path / "whole", "eagle-pt")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_too_little_room_is_told_at_once(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = export(template, tmp_path / "whole", "eagle-pt").bytes_written
    monkeypatch.setattr(fs, "free_bytes", lambda _path: needed - 1)
    with pytest.raises(DiskFullError, match="GB are free; free some space or choose another directory"):
        export(template, tmp_path / "out", "eagle-pt")
    assert list((tmp_path / "out").rglob("*.pt")) == []
    monkeypatch.setattr(fs, "free_bytes", lambda _path: needed)
    assert export(template, tmp_path / "out", "eagle-pt").written == 8


def test_two_exports_at_once(template: Path, tmp_path: Path) -> None:
    """The second one is refused while the first one writes, and the first one is not disturbed."""
    out, ready = tmp_path / "out", os.pipe()

    def first() -> None:
        gated = GatedOS("pwrite", "data_4.pt")
        with disk(gated):
            import threading

            def tell() -> None:
                gated.reached.wait(60)
                os.write(ready[1], b"x")

            threading.Thread(target=tell, daemon=True).start()
            export(template, out, "eagle-pt")

    pid = os.fork()
    if not pid:
        try:
            first()
        finally:
            os._exit(1)
    try:
        assert os.read(ready[0], 1) == b"x"
        with pytest.raises(DatasetLockedError, match="another export is being written here; wait for it"):
            export(template, out, "eagle-pt")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    export(template, out, "eagle-pt")
    export(template, tmp_path / "whole", "eagle-pt")
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("call", "part"),
    [
        ("pwrite", "/data_5.pt"),
        ("open", "/data_5.pt"),
        ("fsync", "/data_5.pt"),
        ("pwrite", "/export-samples"),
        ("pwrite", "/sample_lengths"),
    ],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_full_disk(template: Path, tmp_path: Path, call: str, part: str, workers: int) -> None:
    out = tmp_path / "out"
    with disk(FailAt(errno.ENOSPC, call, part)) as failing, pytest.raises(DiskFullError, match=part):
        export(template, out, "eagle-pt", workers=workers)
    assert failing.failed
    assert not (out / manifest.UNFINISHED).exists()
    assert not (out / "data_5.pt").exists() or "lengths" in part
    assert json.loads((out / manifest.MANIFEST).read_text())["finished"] is None
    export(template, out, "eagle-pt", workers=workers)
    export(template, tmp_path / "whole", "eagle-pt")
    assert content(out) == content(tmp_path / "whole")


def test_damage_in_the_dataset_is_not_passed_on(directory: Path, tmp_path: Path) -> None:
    """The token hashes are checked; a sample whose tokens are wrong ends the export, and its file is not there."""
    dataset = HiddenStateDataset(directory)
    sample = dataset.samples[1]
    extent = sample.extents[-1]
    path = directory / "shards" / f"dp0-pp0-{extent.shard:06d}.safetensors"
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little")
    offsets = json.loads(data[8 : 8 + header])["input_ids"]["data_offsets"]
    data[8 + header + offsets[0] + 8 * extent.start] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="the stored tokens are not those of the prompt"):
        export(directory, tmp_path / "out", "safetensors")
    assert not (tmp_path / "out" / "sample_1.safetensors").exists()


def test_short_writes_are_gone_on_with(template: Path, tmp_path: Path) -> None:
    class Halves(FaultyOS):
        def _counted(self, name, real):
            if name == "pwrite":
                return lambda fd, data, offset: os.pwrite(fd, data[: max(1, len(data) // 2)], offset)
            return super()._counted(name, real)

    with disk(Halves()):
        export(template, tmp_path / "out", "specforge")
    export(template, tmp_path / "whole", "specforge")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_long_sample_takes_little_memory(tmp_path: Path) -> None:
    """States pass through in blocks; nothing of a sample's size is ever held."""
    store = made.open_store(tmp_path / "dataset", info=info_of(), shard_bytes=64 << 20)
    tokens = np.arange(20_000).tolist()
    extents, end = made.append_tokens(store, tokens)
    store.add_sample("hs-long", len(tokens), extents, end)
    store.close()
    made.made_dataset.write_norm(tmp_path / "dataset")
    sizes = []
    dataset = HiddenStateDataset(tmp_path / "dataset")
    for layout in (Format.SPECFORGE, Format.SAFETENSORS):
        kind = run.FORMATS[layout](dataset.info, None)
        source = run.StateSource(dataset, kind.states, kind.dtype)
        sizes += [block.nbytes for _, block in source.blocks(dataset.samples[0])]
        export(tmp_path / "dataset", tmp_path / layout, layout.value)
    assert sum(sizes) == 2 * len(tokens) * info_of().row_bytes
    assert max(sizes) <= 4 << 20
    found = load_file(tmp_path / "safetensors" / "sample_0.safetensors")
    assert torch.equal(found["hidden_states"], torch.stack(dataset[0]["hidden_states"], dim=1))
