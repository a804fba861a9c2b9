"""The engine's own predictions against what is computed from stored final states: right ones agree, others do not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_dataset as made
import numpy as np
import pytest
import torch
from made_answers import EPS, VOCAB, WEIGHT, answer_of, head_weight, write_model
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch.nn.functional import rms_norm

from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.errors import ConfigError, CorruptionError, InputError
from sglang_hs_capture.model_config import load_model_config
from sglang_hs_capture.store.known_answers import AnswerFile, KnownAnswer, load_known_answers
from sglang_hs_capture.verify.known_answer import AnswerReport, check_answers, coarser
from sglang_hs_capture.verify.lm_head import LmHead


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


Change = Callable[[str, NDArray[np.float32]], None]


def check(
    directory: Path,
    model: Path,
    *,
    dtype: str = "float32",
    change: Change = lambda _id, _states: None,
    answers: list[KnownAnswer] | None = None,
    computed_in: str = "float32",
) -> AnswerReport:
    made.make(directory, dtype, change)
    told = [answer_of(id) for id in ("s0", "s1", "s3", "s5")] if answers is None else answers
    dataset = HiddenStateDataset(directory)
    places = {sample.id: place for place, sample in enumerate(dataset.samples)}
    known = [(places[answer.id], answer) for answer in told]
    return check_answers(dataset, known, LmHead(load_model_config(model)), coarser(dtype, computed_in))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3"])
def test_right_states_lead_to_the_answers(tmp_path: Path, model: Path, dtype: str) -> None:
    report = check(tmp_path, model, dtype=dtype)
    assert report.problems() == []
    assert (report.prompts, report.positions, report.unusable) == (4, 7 + 12 + 20 + 9 - 4, 0)
    (column,) = report.columns
    assert (column.column, column.top) == ("final:pre_norm", 1.0)
    assert column.typical < 0.7
    assert column.rare < 2
    assert json.loads(json.dumps(report.to_json()))["columns"][0]["column"] == "final:pre_norm"


def other_row(_id: str, states: NDArray[np.float32]) -> None:
    states[:, 2] = np.roll(states[:, 2], 1, axis=0)


def layer_before(_id: str, states: NDArray[np.float32]) -> None:
    states[:, 2] = states[:, 1] * 4


def normed_already(_id: str, states: NDArray[np.float32]) -> None:
    state = torch.from_numpy(states[:, 2])
    states[:, 2] = rms_norm(state, [made.HIDDEN], WEIGHT, EPS).numpy()


def not_a_number(_id: str, states: NDArray[np.float32]) -> None:
    states[:, 2] = np.nan


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("fault", [other_row, layer_before, normed_already])
def test_a_wrong_final_state_does_not(tmp_path: Path, model: Path, fault: Change, dtype: str) -> None:
    ((column, sample, text),) = check(tmp_path, model, dtype=dtype, change=fault).problems()
    assert column == "final:pre_norm"
    assert sample in {"s0", "s1", "s3", "s5"}
    assert "times what is allowed" in text


def test_states_that_are_no_numbers_lead_to_nothing(tmp_path: Path, model: Path) -> None:
    report = check(tmp_path, model, change=not_a_number)
    assert len(report.problems()) == 1
    assert report.columns[0].top == 0
    assert "Infinity" not in json.dumps(report.to_json())


def test_one_wrong_sample_of_four_is_named(tmp_path: Path, model: Path) -> None:
    def change(id: str, states: NDArray[np.float32]) -> None:
        if id == "s0":
            other_row(id, states)

    ((_, sample, _),) = check(tmp_path, model, change=change).problems()
    assert sample == "s0"


def test_one_wrong_sample_among_many_is_found(tmp_path: Path, model: Path) -> None:
    """So few of all positions that neither their median nor their 99th percentile tells."""

    def change(id: str, states: NDArray[np.float32]) -> None:
        if id == "s0":
            other_row(id, states)

    report = check(tmp_path, model, change=change, answers=[*[answer_of("s3")] * 40, answer_of("s0")])
    assert report.columns[0].rare < 1
    ((_, sample, text),) = report.problems()
    assert (sample, "half of this sample's" in text) == ("s0", True)


def test_another_norm_is_found(tmp_path: Path, model: Path) -> None:
    made.make(tmp_path, "float32")
    made.write_norm(tmp_path, weight=np.linspace(1.5, 0.5, made.HIDDEN))
    known = [(3, answer_of("s3"))]
    head = LmHead(load_model_config(model))
    assert len(check_answers(HiddenStateDataset(tmp_path), known, head, "float32").problems()) == 1


def test_an_answer_may_begin_anywhere(tmp_path: Path, model: Path) -> None:
    report = check(tmp_path, model, answers=[answer_of("s3", 15), answer_of("s1", 10)])
    assert (report.positions, report.problems()) == (5, [])


def test_a_target_that_computes_garbage_is_told(tmp_path: Path, model: Path) -> None:
    """The made head knows nothing of the tokens; one that does not compute a number is told as well."""
    report = check(tmp_path, model)
    assert report.perplexity > VOCAB / 8
    assert "computes garbage" in report.poor_target()
    good = answer_of("s3")
    broken = KnownAnswer(good.id, good.length, good.end_hash, 0, (None, *good.logprobs[1:]), good.top)
    broken_report = check(tmp_path / "second", model, answers=[broken])
    assert (broken_report.unusable, broken_report.problems()) == (1, [])
    assert "1 of the engine's 19 log-probabilities are NaN" in broken_report.poor_target()
    nothing = KnownAnswer(good.id, good.length, good.end_hash, 0, (None,) * 19, good.top)
    empty = check(tmp_path / "third", model, answers=[nothing])
    assert (empty.unusable, empty.columns) == (19, ())
    assert empty.to_json()["perplexity"] is None


def test_a_target_that_knows_its_text_is_not(tmp_path: Path, model: Path) -> None:
    good = answer_of("s3")
    sure = KnownAnswer(good.id, good.length, good.end_hash, 0, (-1.5,) * 19, good.top)
    assert check(tmp_path, model, answers=[sure]).poor_target() == ""


def test_without_answers_nothing_is_said(tmp_path: Path, model: Path) -> None:
    with pytest.raises(InputError, match="there is none"):
        check(tmp_path, model, answers=[])


@pytest.mark.parametrize("token", [VOCAB, -1])
def test_a_token_that_the_model_does_not_have(tmp_path: Path, model: Path, token: int) -> None:
    good = answer_of("s0")
    other = KnownAnswer(good.id, good.length, good.end_hash, 0, good.logprobs, (token, *good.top[1:]))
    with pytest.raises(ConfigError, match=f"token {token}, and the model has {VOCAB}"):
        check(tmp_path, model, answers=[other])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("lm_head.weight", {}),
        ("lm_head.weight", {"sharded": True}),
        ("language_model.lm_head.weight", {"sharded": True}),
        ("model.embed_tokens.weight", {"tied": True}),
        ("language_model.model.embed_tokens.weight", {"tied": True, "sharded": True}),
    ],
)
def test_the_head_is_found_wherever_it_is(tmp_path: Path, name: str, settings: dict[str, Any], monkeypatch) -> None:
    monkeypatch.setattr("sglang_hs_capture.verify.lm_head.PIECE_BYTES", 100 * 4 * made.HIDDEN)
    head = LmHead(load_model_config(write_model(tmp_path / "model", name=name, **settings)))
    assert (head.name, head.dtype) == (name, "float32")
    pieces = list(head.pieces())
    assert [first for first, _ in pieces] == list(range(0, VOCAB, 100))
    assert torch.equal(torch.cat([piece for _, piece in pieces]), head_weight())
    tokens = torch.tensor([7, 2047, 7, 0])
    assert torch.equal(head.rows_of(tokens), head_weight()[tokens])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "head.weight"}, "expected lm_head.weight or language_model.lm_head.weight in a safetensors file"),
        ({"name": "head.weight", "sharded": True}, "among the weights"),
        ({"vocab_size": 1000}, r"has the shape \[2048, 32\]; the config says \[1000, 32\]"),
    ],
)
def test_a_checkpoint_without_the_head_is_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LmHead(load_model_config(write_model(tmp_path / "model", **settings)))


def test_a_head_that_is_not_there_or_quantised_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", sharded=True)
    shutil.move(model / "model-00002-of-00002.safetensors", tmp_path / "away")
    with pytest.raises(ConfigError, match="should be in this file"):
        LmHead(load_model_config(model))
    save_file({"lm_head.weight": head_weight().to(torch.int8)}, model / "model-00002-of-00002.safetensors")
    with pytest.raises(ConfigError, match="it is quantised"):
        LmHead(load_model_config(model))
    (model / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        LmHead(load_model_config(model))


def test_answers_come_back_as_they_were_kept(tmp_path: Path) -> None:
    kept = [answer_of("s0"), answer_of("s3", 7)]
    file = AnswerFile(tmp_path)
    for answer in kept:
        file.append(answer)
    file.close()
    assert load_known_answers(tmp_path) == kept


@pytest.mark.parametrize(
    "change", [{"start": 6}, {"start": -1}, {"id": 5}, {"logprobs": [1.0]}, {"top": []}, {"end_hash": "x"}]
)
def test_a_record_that_lies_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    made.write_answers(tmp_path, [{**answer_of("s0").to_json(), **change}])
    with pytest.raises(CorruptionError, match="line 1"):
        load_known_answers(tmp_path)
