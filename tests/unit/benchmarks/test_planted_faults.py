"""Faults planted in a made dataset: flipped bits are all found, and every wrong state by one of the checks."""

import shutil
from pathlib import Path
from typing import Any

import made_dataset as made
import numpy as np
import pytest
import torch
from made_answers import answer_of, write_model

from benchmarks import planted_faults
from benchmarks.planted_faults import (
    FAULTS,
    Outcome,
    Reference,
    faults_table,
    flip_bits,
    flips_table,
    plant,
    take_samples,
)
from sglang_hs_capture import HiddenStateDataset
from sglang_hs_capture.cli import known_answers
from sglang_hs_capture.layers import Final
from sglang_hs_capture.store.session import SessionRecord, write_session

# What finds each fault: a kind of finding, a column by the known answers, a column by the reference.
EXPECTED = {
    "two samples' states swapped, tokens right": (set(), {"final:pre_norm"}, set(made.COLUMNS)),
    "two samples' rows swapped in the journal": ({"tokens", "journal-record"}, None, None),
    "two samples' rows swapped in the journal, with length and hash": ({"other-tokens"}, None, None),
    "one boundary shifted by one layer": (set(), set(), {"boundary:3"}),
    "one boundary shifted onto the next one captured": ({"column-copied"}, None, None),
    "final state of the layer before the last": (set(), {"final:pre_norm"}, {"final:pre_norm"}),
    "post-norm stored as pre-norm": (set(), {"final:pre_norm"}, {"final:pre_norm"}),
    "one chunk missing": ({"journal-record"}, None, None),
    "one chunk missing, length and hash of the rest": ({"other-tokens"}, None, None),
    "a chunk's rows twice": ({"tokens"}, None, None),
    "a chunk's states twice, tokens right": (set(), {"final:pre_norm"}, set(made.COLUMNS)),
    "a zeroed row": ({"zero-row"}, None, None),
    "states of another prompt of the same length, tokens right": (set(), {"final:pre_norm"}, set(made.COLUMNS)),
    "rows of another prompt of the same length": ({"tokens"}, None, None),
    "a stale prefix": ({"tokens"}, None, None),
    "a stale prefix's states, tokens right": (set(), {"final:pre_norm"}, set(made.COLUMNS)),
}


class MadeReference(Reference):
    """The model of made datasets: its boundaries 1, 3 and 6, and states of their own at all others."""

    def __init__(self) -> None:
        pass

    def states(self, tokens: Any, boundaries: Any, final: Final) -> list[torch.Tensor]:
        made_states = torch.from_numpy(made.states_of(np.array(tokens)))
        others = {boundary: made_states[:, 1].flip(-1) for boundary in boundaries}
        known = {1: made_states[:, 0], 3: made_states[:, 1]}
        return [{**others, **known}[boundary] for boundary in boundaries] + [made_states[:, 2]]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "dataset"
    made.make(directory, "float32")
    write_session(directory, SessionRecord("dp0-pp0", "5e55" * 8, 2**22, "elsewhere", state="closed"))
    made.write_answers(directory, [answer_of(id).to_json() for id in ("s1", "s3", "s5", "s0")])
    return directory


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(known_answers, "require_same_model", lambda *_: None)
    return write_model(tmp_path / "model")


def test_every_fault_is_tried() -> None:
    assert list(EXPECTED) == list(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(template: Path, model: Path, name: str) -> None:
    structure, known_answer, reference = EXPECTED[name]
    outcome = plant(template, model, MadeReference(), FAULTS[name])
    assert outcome.found
    assert structure & set(outcome.structure) or (not structure and not outcome.structure), outcome
    assert (outcome.known_answer is None, outcome.reference is None) == (known_answer is None, reference is None)
    assert known_answer is None or set(outcome.known_answer or ()) == known_answer
    assert reference is None or set(outcome.reference or ()) == reference


def test_without_a_fault_nothing_is_found(template: Path, model: Path) -> None:
    assert plant(template, model, MadeReference(), None) == Outcome([], [], [])


def test_some_samples_are_taken_as_they_were_captured(template: Path, model: Path, tmp_path: Path) -> None:
    take_samples(template, 3, tmp_path / "few")
    few, all_of_them = HiddenStateDataset(tmp_path / "few"), HiddenStateDataset(template)
    assert [sample.id for sample in few.samples] == ["s0", "s5", "s1"], "the shortest that have answers"
    for number, sample in enumerate(few.samples):
        same = all_of_them[[entry.id for entry in all_of_them.samples].index(sample.id)]
        assert torch.equal(torch.stack(few[number]["hidden_states"]), torch.stack(same["hidden_states"]))
        assert torch.equal(few[number]["loss_mask"], same["loss_mask"])
    assert plant(tmp_path / "few", model, MadeReference(), None) == Outcome([], [], [])


@pytest.mark.parametrize("count", [270, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found(template: Path, tmp_path: Path, count: int) -> None:
    dataset = Path(shutil.copytree(template, tmp_path / "dataset"))
    before = {path: path.read_bytes() for path in dataset.rglob("*") if path.is_file()}
    flips = flip_bits(dataset, count)
    assert set(flips) == {
        *("shards: headers", "shards: states", "shards: tokens, positions, hashes", "journal", "ledger"),
        *("known answers", "dataset.json", "session records", "final norm"),
    }
    assert sum(outcome.tried for outcome in flips.values()) == count
    assert [missed for outcome in flips.values() for missed in outcome.missed] == []
    assert all(outcome.found == outcome.tried for outcome in flips.values())
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_bit_that_nothing_covers_would_be_told(template: Path, tmp_path: Path, monkeypatch) -> None:
    dataset = Path(shutil.copytree(template, tmp_path / "dataset"))
    (dataset / "notes.txt").write_text("of no account")
    monkeypatch.setattr(planted_faults, "regions", lambda _: {"notes": [(dataset / "notes.txt", 0, 13)]})
    outcome = flip_bits(dataset, 2)["notes"]
    assert (outcome.tried, outcome.found, len(outcome.missed)) == (2, 0, 2)
    assert flips_table({"notes": outcome})[-1] == "| all | 2 | 0 |"


def test_the_table_says_who_found_what() -> None:
    rows = {"one": Outcome(["tokens"], None, None), "other": Outcome([], ["final:pre_norm"], [])}
    assert faults_table(rows)[2:] == ["| one | `tokens` | not asked | not asked |", "| other | - | found | - |"]
