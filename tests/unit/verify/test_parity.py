"""The reference through ``transformers``, and the comparison of a dataset with it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hs_capture.demo.checkpoint import make_kimi_k25
from sglang_hs_capture.errors import ConfigError, InputError
from sglang_hs_capture.float8 import scales_from_absmax
from sglang_hs_capture.kernels import reference
from sglang_hs_capture.layers import Final
from sglang_hs_capture.reader.dequantize import dequantize
from sglang_hs_capture.verify.parity import ReferenceModel, compare, load_reference, reference_states

COLUMNS = ["boundary:0", "boundary:2", "final:pre_norm", "final:post_norm"]


class Samples:
    """A dataset in memory."""

    def __init__(self, samples: list[dict[str, Any]], columns: list[str]) -> None:
        self.samples, self.columns, self.read = samples, columns, []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return self.samples[index]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kimi_k25(tmp_path_factory.mktemp("kimi"), num_hidden_layers=3)


def captured(model: Path, lengths: list[int], columns: list[str] = COLUMNS) -> Samples:
    """A dataset without any error."""
    boundaries = [int(name.split(":")[1]) for name in columns if name.startswith("boundary")]
    finals = [name for name in columns if name.startswith("final")]
    final = Final.BOTH if len(finals) == 2 else Final(finals[0].split(":")[1])
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 2000, (length,), generator=generator) for length in lengths]
    return Samples(
        [{"input_ids": ids, "hidden_states": reference_states(model, ids, boundaries, final)} for ids in prompts],
        columns,
    )


def test_states_are_what_the_weights_say(model: Path) -> None:
    ids = torch.tensor([5, 900, 17, 5])
    embeddings, pre_norm, post_norm = reference_states(model, ids, [0], Final.BOTH)
    weights = load_file(model / "model.safetensors")
    assert torch.equal(embeddings, weights["language_model.model.embed_tokens.weight"][ids])
    normalised = pre_norm * torch.rsqrt(pre_norm.pow(2).mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(normalised * weights["language_model.model.norm.weight"], post_norm)
    logits = post_norm @ weights["language_model.lm_head.weight"].T
    torch.testing.assert_close(logits, load_reference(model).logits(ids), rtol=1e-4, atol=1e-4)


def test_a_boundary_depends_on_the_layers_below_it_only(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["language_model.model.layers.1.mlp.shared_experts.down_proj.weight"] *= 2
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(40, 60)
    before = reference_states(model, ids, [0, 1, 2], Final.PRE_NORM)
    after = reference_states(tmp_path, ids, [0, 1, 2], Final.PRE_NORM)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, False]


def test_an_exact_dataset_has_no_error(model: Path) -> None:
    report = compare(captured(model, [1, 30]), model)
    assert (report.samples, report.tokens, report.worst, report.excess) == (2, 31, 0.0, 0.0)
    assert [column.column for column in report.columns] == COLUMNS


def test_an_error_shows_in_its_column_and_with_its_size(model: Path) -> None:
    dataset = captured(model, [8, 9])
    row = dataset.samples[1]["hidden_states"][1][4]
    row += 0.01 * row
    report = compare(dataset, model)
    assert [column.relative > 0 for column in report.columns] == [False, True, False, False]
    assert report.worst == pytest.approx(0.01, rel=1e-3)
    assert 0 < report.columns[1].absolute <= 0.0101


def test_a_single_form_of_the_final_state_is_compared(model: Path) -> None:
    assert compare(captured(model, [5], ["boundary:1", "final:post_norm"]), model).worst == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_never_passes(model: Path, value: float) -> None:
    dataset = captured(model, [6])
    dataset.samples[0]["hidden_states"][2][0, 0] = value
    assert not compare(dataset, model).worst < 1.0


def test_bfloat16_rows_are_compared_in_float32(model: Path) -> None:
    dataset = captured(model, [20])
    sample = dataset.samples[0]
    sample["hidden_states"] = [state.bfloat16() for state in sample["hidden_states"]]
    assert 1e-4 < compare(dataset, model).worst < 2**-8


def through_float8(state: torch.Tensor) -> torch.Tensor:
    """A state ``[S, H]`` as the dataset gives it that was stored in float8."""
    codes, absmax = torch.empty(len(state), 1, state.shape[1], dtype=torch.float8_e4m3fn), torch.empty(len(state), 1)
    reference.pack_state(state, None, codes, absmax, 0)
    return dequantize(codes[:, 0], torch.from_numpy(scales_from_absmax(absmax[:, 0].numpy())), torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "finer", "stored"),
    [
        ("bfloat16", "float16", torch.Tensor.bfloat16),
        ("float16", "float32", torch.Tensor.half),
        ("float8_e4m3", "bfloat16", through_float8),
    ],
)
def test_rounding_to_the_stored_dtype_is_allowed_and_no_more(
    model: Path, dtype: str, finer: str, stored: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    dataset = captured(model, [1, 40])
    for sample in dataset.samples:
        sample["hidden_states"] = [stored(state) for state in sample["hidden_states"]]
    excess = compare(dataset, model, dtype=dtype).excess
    # Of the many elements some are rounded by nearly all that is allowed.
    assert 0.8 < excess <= 1
    assert compare(dataset, model, dtype=finer).excess > 1


def test_one_element_beyond_the_rounding_of_float8_is_told(model: Path) -> None:
    dataset = captured(model, [30])
    states = [through_float8(state) for state in dataset.samples[0]["hidden_states"]]
    dataset.samples[0]["hidden_states"] = states
    row = states[1][7]
    place = int(row.abs().argmax())
    row[place] *= 1.1
    report = compare(dataset, model, dtype="float8_e4m3")
    assert [column.excess > 1 for column in report.columns] == [False, True, False, False]
    assert report.excess == report.columns[1].excess
    row[place] = math.nan
    assert not compare(dataset, model, dtype="float8_e4m3").excess <= 1


def test_a_limit_spreads_over_the_dataset(model: Path) -> None:
    dataset = captured(model, [3] * 10)
    assert compare(dataset, model, limit=2).samples == 2
    assert dataset.read == [0, 5]


def test_an_empty_dataset_is_refused(model: Path) -> None:
    with pytest.raises(InputError, match="no sample"):
        compare(Samples([], COLUMNS), model)


def test_a_checkpoint_without_a_weight_is_refused(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    del weights["language_model.model.layers.2.self_attn.o_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"lacks 1 weights .* model\.layers\.2\.self_attn\.o_proj\.weight"):
        ReferenceModel(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised"),
        ({"model_type": "my_own"}, "no model of the type 'my_own'"),
    ],
)
def test_a_model_that_transformers_cannot_stand_in_for_is_refused(
    model: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = json.loads((model / "config.json").read_text())
    config["text_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        ReferenceModel(tmp_path)
