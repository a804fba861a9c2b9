"""Each layout against the dataset itself, bit for bit, read with nothing but torch, safetensors and datasets."""

import json
import zipfile
from pathlib import Path

import exported_dataset as made
import numpy as np
import pytest
import torch
from exported_dataset import HOSTILE, POST_NORM, PRE_NORM, export, info_of, normed
from safetensors import safe_open
from safetensors.torch import load_file

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.errors import ConfigError, DatasetMismatchError, StoreError
from sglang_hs_capture.export import states as states_module
from sglang_hs_capture.export.formats import FORMATS
from sglang_hs_capture.export.formats.modelopt import file_stem
from sglang_hs_capture.export.options import ExportDtype, Format

DATASETS = {
    "plain": made.make,
    "float8": lambda path: made.make(path, info_of("float8_e4m3")),
    "float32": lambda path: made.make(path, info_of("float32")),
    "stages": lambda path: made.make(path, stages=True),
    "stages in float8": lambda path: made.make(path, info_of("float8_e4m3"), stages=True),
    "both finals": lambda path: made.make(path, info_of(finals=(PRE_NORM, POST_NORM))),
}


@pytest.fixture(scope="module", params=DATASETS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DATASETS[request.param](tmp_path_factory.mktemp("dataset") / "dataset")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make(tmp_path_factory.mktemp("plain") / "dataset")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of more than a few tokens passes in several blocks."""
    monkeypatch.setattr(states_module, "_BLOCK_BYTES", 5 * 4 * made.HIDDEN * 2)


def load(path: Path) -> dict:
    """A pickle, twice: as its trainer maps it, and with the checksums of its zip file looked at."""
    assert zipfile.ZipFile(path).testzip() is None
    mapped = torch.load(path, weights_only=True, mmap=True)
    whole = torch.load(path, weights_only=True)
    assert list(mapped) == list(whole)
    return mapped


def in_bfloat16(item: dict, columns: tuple[str, ...], *names: str) -> list[torch.Tensor]:
    return [item["hidden_states"][columns.index(name)].to(torch.bfloat16) for name in names]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Same dtype, shape and bits."""
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def require_tokens(found: dict, item: dict, ids: str = "input_ids") -> None:
    assert same(found[ids], item["input_ids"])
    assert same(found["loss_mask"], item["loss_mask"])
    assert found[ids].dtype == torch.int64


BETWEEN = ("boundary:1", "boundary:2", "boundary:4")


def test_eagle_pt(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(directory, out, "eagle-pt", workers=3).written == 8
    dataset = HiddenStateDataset(directory)
    for number, item in enumerate(dataset):
        found = load(out / f"data_{number}.pt")
        assert list(found) == ["input_ids", "hidden_states", "loss_mask"]
        require_tokens(found, item)
        expected = in_bfloat16(item, dataset.columns, *BETWEEN, PRE_NORM)
        assert len(found["hidden_states"]) == 4
        assert all(map(same, found["hidden_states"], expected))
    lengths = json.loads((out / "sample_lengths.json").read_text())
    assert lengths == {str(number): sample.length for number, sample in enumerate(dataset.samples)}
    config = json.loads((out / "data_config.json").read_text())
    assert config["hidden_states"]["layer_ids"] == [0, 1, 3, 5]
    assert config["model"] == {"target_model_path": "/models/toy", "hidden_size": made.HIDDEN}
    # Its reader takes whatever ends in pt.
    assert sorted(p.name for p in out.rglob("*pt")) == sorted(f"data_{number}.pt" for number in range(8))


def test_speculators(directory: Path, tmp_path: Path) -> None:
    import datasets

    out = tmp_path / "out"
    export(directory, out, "speculators", workers=2)
    dataset = HiddenStateDataset(directory)
    rows = datasets.load_from_disk(str(out))
    assert list(rows.with_format(None)["seq_len"]) == [sample.length for sample in dataset.samples]
    for number, item in enumerate(dataset):
        require_tokens(rows[number], item)
        found = load_file(out / "hidden_states" / f"hs_{number}.safetensors")
        assert set(found) == {"token_ids", "hidden_states"}
        assert same(found["token_ids"], item["input_ids"])
        expected = in_bfloat16(item, dataset.columns, *BETWEEN, PRE_NORM)
        assert same(found["hidden_states"], torch.stack(expected, dim=1))
    counts: dict[int, int] = {}
    for item in dataset:
        for token in item["input_ids"][item["loss_mask"] == 1].tolist():
            counts[token] = counts.get(token, 0) + 1
    assert torch.load(out / "token_freq.pt", weights_only=True) == counts


def test_specforge(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(directory, out, "specforge")
    dataset = HiddenStateDataset(directory)
    exact = HiddenStateDataset(directory, raw=True)
    for number, item in enumerate(dataset):
        found = load(out / "rows_0-2000" / f"data_{number}.ckpt")
        assert list(found) == ["input_ids", "loss_mask", "hidden_state", "aux_hidden_state"]
        require_tokens(found, item)
        between = torch.cat(in_bfloat16(item, dataset.columns, *BETWEEN), dim=-1)
        assert same(found["aux_hidden_state"], between[None])
        if POST_NORM in dataset.columns:
            assert same(found["hidden_state"], in_bfloat16(item, dataset.columns, POST_NORM)[0][None])
            continue
        last = dataset.columns.index(PRE_NORM)
        before = exact[number]["hidden_states"][last].float()
        if dataset.info.scaled:
            before *= exact[number]["scales"][last][:, None]
        expected = normed(directory, before).to(torch.bfloat16)[None]
        assert found["hidden_state"].dtype == torch.bfloat16
        # Float32 and float64 may fall on two sides of a rounding's middle; never further apart.
        assert torch.allclose(found["hidden_state"].float(), expected.float(), rtol=2**-7, atol=1e-30)
        assert (found["hidden_state"] == expected).float().mean() > 0.99


def test_modelopt(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(directory, out, "modelopt")
    dataset = HiddenStateDataset(directory)
    assert len(list(out.rglob("*.pt"))) == len(dataset) == 8
    for item in dataset:
        found = load(out / f"{file_stem(item['id'])}.pt")
        require_tokens(found, item)
        *between, last = in_bfloat16(item, dataset.columns, *BETWEEN, PRE_NORM)
        assert same(found["aux_hidden_states"], torch.cat(between, dim=-1))
        assert same(found["hidden_states"], last)
        assert found["conversation_id"] == item["id"]
        assert found["hidden_states_prenorm"] is True


def test_safetensors(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(directory, out, "safetensors", workers=2)
    dataset = HiddenStateDataset(directory)
    for number, item in enumerate(dataset):
        path = out / f"sample_{number}.safetensors"
        found = load_file(path)
        require_tokens(found, item)
        assert same(found["hidden_states"], torch.stack(item["hidden_states"], dim=1))
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        assert json.loads(metadata["id"]) == item["id"]
        assert tuple(json.loads(metadata["columns"])) == dataset.columns
        assert json.loads(metadata["dataset"])["config_hash"] == "c0ffee"
        assert metadata["convention"] == "boundary"
        header = int.from_bytes(path.read_bytes()[:8], "little")
        assert (8 + header + 16 * len(item["input_ids"])) % 4096 == 0


@pytest.mark.parametrize("layout", [name.value for name in Format])
def test_the_metadata_names_the_layers_by_the_trainers_convention(plain: Path, tmp_path: Path, layout: str) -> None:
    export(plain, tmp_path / "out", layout)
    ids = json.loads((tmp_path / "out" / "export.json").read_text())["layer_ids"]
    boundary = layout in ("speculators", "safetensors")
    assert ids["convention"] == ("boundary" if boundary else "output_of_layer")
    assert ids["aux"] == ([1, 2, 4] if boundary else [0, 1, 3])
    assert ids["final"] == (6 if boundary else 5)
    assert ids["final_form"] == ("post_norm" if layout == "specforge" else "pre_norm")


def test_a_dtype_of_ones_own(tmp_path: Path) -> None:
    directory = made.make(tmp_path / "dataset", info_of("float32"))
    export(directory, tmp_path / "pt", "eagle-pt", dtype=ExportDtype.FLOAT32)
    export(directory, tmp_path / "half", "safetensors", dtype=ExportDtype.FLOAT16)
    for number, item in enumerate(HiddenStateDataset(directory)):
        found = load(tmp_path / "pt" / f"data_{number}.pt")["hidden_states"]
        assert all(map(same, found, item["hidden_states"]))
        half = load_file(tmp_path / "half" / f"sample_{number}.safetensors")["hidden_states"]
        assert same(half, torch.stack(item["hidden_states"], dim=1).to(torch.float16))


@pytest.mark.parametrize("layout", Format)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_states_that_float16_has_no_numbers_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Format, dtype: str
) -> None:
    directory = made.make(tmp_path / "dataset", info_of(dtype))
    read = HiddenStateDataset.read_blocks

    def with_a_large_one(self, part, rows):
        for start, states, scales in read(self, part, rows):
            changed = states.clone()
            if start <= 1 < start + len(states):
                changed[1 - start, 2, 3] = 70_000.0
            yield start, changed, scales

    monkeypatch.setattr(HiddenStateDataset, "read_blocks", with_a_large_one)
    said = (
        r"--dtype float16: expected states of at most 65504.*; boundary:4 of the sample '.*' is larger at position 1;"
    )
    with pytest.raises(ConfigError, match=said):
        export(directory, tmp_path / "half", layout, dtype=ExportDtype.FLOAT16)
    assert export(directory, tmp_path / "wide", layout).samples > 0


def test_specforge_has_two_thousand_files_a_folder() -> None:
    kind = FORMATS[Format.SPECFORGE](info_of(), None)
    sample = None
    names = [kind.file(number, sample) for number in (0, 1999, 2000, 4001)]  # type: ignore[arg-type]
    assert names == [
        "rows_0-2000/data_0.ckpt",
        "rows_0-2000/data_1999.ckpt",
        "rows_2000-4000/data_2000.ckpt",
        "rows_4000-6000/data_4001.ckpt",
    ]


HOSTILE_IDS = [
    *("", ".", "..", "/", "a/b", "../up", "a\x00b", "a\nb", " a", "-rf", "CON", "Case", "x" * 101, "ünïcode", "\ud800"),
    *("x.pt", ".hidden", "export.json", HOSTILE, f"sample.{'0' * 24}"),
]


@pytest.mark.parametrize("id", HOSTILE_IDS)
def test_a_hostile_id_never_becomes_a_name(id: str) -> None:
    stem = file_stem(id)
    assert stem.startswith("sample.")
    assert len(stem) == len("sample.") + 24
    assert set(stem.removeprefix("sample.")) <= set("0123456789abcdef")


def test_harmless_ids_are_kept_and_no_two_names_are_the_same() -> None:
    harmless = ["a", "conversation-1", "0", "7b86bf06a59811a29dc4187c", "x" * 100, "a_b-c"]
    assert [file_stem(id) for id in harmless] == harmless
    ids = [*harmless, *HOSTILE_IDS, *(file_stem(id) for id in HOSTILE_IDS)]
    assert len({file_stem(id).lower() for id in ids}) == len(set(ids))


def test_only_the_state_after_the_norm(tmp_path: Path) -> None:
    directory = made.make(tmp_path / "dataset", info_of(finals=(POST_NORM,)))
    for layout in ("eagle-pt", "speculators"):
        with pytest.raises(ConfigError, match=r"applies the final norm itself and wants final:pre_norm.*capture with"):
            export(directory, tmp_path / layout, layout)
        assert not (tmp_path / layout).exists()
    export(directory, tmp_path / "specforge", "specforge")
    export(directory, tmp_path / "modelopt", "modelopt")
    item = HiddenStateDataset(directory)[0]
    found = load(tmp_path / "specforge" / "rows_0-2000" / "data_0.ckpt")
    assert same(found["hidden_state"], item["hidden_states"][-1][None])
    found = load(tmp_path / "modelopt" / "one.pt")
    assert found["hidden_states_prenorm"] is False
    assert same(found["hidden_states"], item["hidden_states"][-1])


def test_the_norm_is_needed_where_it_has_to_be_applied(tmp_path: Path) -> None:
    directory = made.make(tmp_path / "dataset")
    (directory / "final_norm.safetensors").unlink()
    with pytest.raises(StoreError, match="captured without the final norm's weight"):
        export(directory, tmp_path / "specforge", "specforge")
    export(directory, tmp_path / "eagle", "eagle-pt")


@pytest.mark.parametrize(("boundaries", "refused"), [((1, 3), {"specforge"}), ((1, 2, 3, 4), {"specforge"})])
def test_other_numbers_of_boundaries(tmp_path: Path, boundaries: tuple[int, ...], refused: set[str]) -> None:
    directory = made.make(tmp_path / "dataset", info_of(boundaries=boundaries))
    for name in Format:
        if name.value in refused:
            with pytest.raises(ConfigError, match=f"states of 3 layers; the dataset has {len(boundaries)} of them"):
                export(directory, tmp_path / name, name.value)
        else:
            assert export(directory, tmp_path / name, name.value).samples == 8
    states = load(tmp_path / "eagle-pt" / "data_1.pt")["hidden_states"]
    assert len(states) == len(boundaries) + 1


def test_the_embeddings_have_no_name_among_outputs_of_layers(tmp_path: Path) -> None:
    directory = made.make(tmp_path / "dataset", info_of(boundaries=(0, 2, 4)))
    for layout in ("eagle-pt", "specforge", "modelopt"):
        with pytest.raises(ConfigError, match=f"--format {layout}: boundary 0 holds the embeddings"):
            export(directory, tmp_path / layout, layout)
    assert export(directory, tmp_path / "speculators", "speculators").layer_ids["aux"] == [0, 2, 4]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"num_hidden_layers": 6, "hidden_size": made.HIDDEN, "vocab_size": 100}
    (folder / "config.json").write_text(json.dumps({"architectures": ["DeepseekV3ForCausalLM"], **sizes}))
    return folder


@pytest.fixture
def of_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy dataset's hash of a config is no config's."""
    monkeypatch.setattr("sglang_hs_capture.model_config.config_hash", lambda raw: "c0ffee")


@pytest.mark.usefixtures("of_model")
def test_a_draft_vocabulary(plain: Path, tmp_path: Path, model: Path) -> None:
    for layout in ("speculators", "eagle-pt", "specforge"):
        export(plain, tmp_path / layout, layout, draft_vocab_size=10, verifier=model)
    d2t, t2d = (np.load(tmp_path / "speculators" / f"{name}-10.npy") for name in ("d2t", "t2d"))
    assert (d2t.dtype, d2t.shape) == (np.int64, (10,))
    assert (t2d.dtype, t2d.shape) == (np.bool_, (100,))
    assert np.array_equal(np.flatnonzero(t2d), d2t + np.arange(10))
    counts = torch.load(tmp_path / "speculators" / "token_freq.pt", weights_only=True)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))[:10]
    assert np.flatnonzero(t2d).tolist() == sorted(ranked)
    assert np.array_equal(np.load(tmp_path / "eagle-pt" / "t2d-10.npy"), t2d)
    found = torch.load(tmp_path / "specforge" / "vocab_mapping" / "vocab_mapping.pt", weights_only=True)
    assert set(found) == {"d2t", "t2d"}
    assert same(found["d2t"], torch.from_numpy(d2t))
    assert same(found["t2d"], torch.from_numpy(t2d))


@pytest.mark.usefixtures("of_model")
def test_a_draft_vocabulary_larger_than_what_was_counted_takes_the_lowest_tokens(
    plain: Path, tmp_path: Path, model: Path
) -> None:
    export(plain, tmp_path / "out", "speculators", draft_vocab_size=60, verifier=model)
    counts = torch.load(tmp_path / "out" / "token_freq.pt", weights_only=True)
    chosen = set(np.flatnonzero(np.load(tmp_path / "out" / "t2d-60.npy")).tolist())
    assert len(chosen) == 60
    assert chosen >= set(counts)
    assert chosen - set(counts) == set([t for t in range(100) if t not in counts][: 60 - len(counts)])


@pytest.mark.usefixtures("of_model")
def test_what_a_draft_vocabulary_needs(plain: Path, tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="name the model's directory with --verifier"):
        export(plain, tmp_path / "out", "speculators", draft_vocab_size=10)
    with pytest.raises(ConfigError, match="expected at most the target's 100 tokens, got 101"):
        export(plain, tmp_path / "out", "speculators", draft_vocab_size=101, verifier=model)
    for layout in ("modelopt", "safetensors"):
        with pytest.raises(ConfigError, match=f"the format {layout} has no place for a vocabulary"):
            export(plain, tmp_path / "out", layout, draft_vocab_size=10, verifier=model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 60}))
    with pytest.raises(ConfigError, match=r"the loss is on token .* the target has tokens from 0 to 59"):
        export(plain, tmp_path / "out", "speculators", draft_vocab_size=10, verifier=model)


def test_a_verifier_that_is_another_model(plain: Path, tmp_path: Path, model: Path) -> None:
    with pytest.raises(DatasetMismatchError, match="captured from a model with the config c0ffee"):
        export(plain, tmp_path / "out", "eagle-pt", verifier=model)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", Format)
def test_a_sample_with_an_image_has_placeholders_and_no_loss_there(tmp_path: Path, layout: Format) -> None:
    made.add_image(made.make(tmp_path / "dataset"), "image")
    out = tmp_path / "out"
    assert export(tmp_path / "dataset", out, layout.value).samples == len(made.PROMPTS) + 2
    dataset = HiddenStateDataset(tmp_path / "dataset")
    items = {item["id"]: item for item in dataset}
    assert items["image"]["input_ids"].tolist() == [41, 99, 99, 99, 42, 43]
    assert items["image"]["loss_mask"].tolist() == [0, 0, 0, 0, 1, 1]
    found = []
    for path in out.rglob("*"):
        if path.suffix in (".pt", ".ckpt") and path.name.removesuffix(path.suffix) != "token_freq":
            found.append(load(path))
        elif path.suffix == ".safetensors":
            found.append(load_file(path))
    names = ("input_ids", "token_ids")
    [exported] = [item for item in found if any(99 in item[name].tolist() for name in names if name in item)]
    assert next(exported[name] for name in names if name in exported).tolist() == [41, 99, 99, 99, 42, 43]
    if "loss_mask" in exported:
        assert exported["loss_mask"].tolist() == [0, 0, 0, 0, 1, 1]
