"""The committer: chunks become samples, bad rows are never linked, an error stops capture and loses nothing."""

import json
import time
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from sglang_hs_capture.capture.rows import plan_rows
from sglang_hs_capture.compat import PrefillBatch
from sglang_hs_capture.errors import DiskFullError
from sglang_hs_capture.float8 import scales_from_absmax
from sglang_hs_capture.kernels import reference
from sglang_hs_capture.staging.copier import Staging
from sglang_hs_capture.staging.ring import Consumer, Producer, RingMemory
from sglang_hs_capture.store.hashing import end_hash
from sglang_hs_capture.store.schema import DatasetInfo, make_rid, sample_key
from sglang_hs_capture.store.writer import StoreWriter
from sglang_hs_capture.writing import committer as committer_module
from sglang_hs_capture.writing.committer import Committer
from sglang_hs_capture.writing.plan import BatchHeader

HIDDEN, COLUMNS = 4, 2
PAD = 99


TORCH_DTYPES = {"float32": torch.float32, "float8_e4m3": torch.float8_e4m3fn}


def make_info(dtype: str = "float32") -> DatasetInfo:
    return DatasetInfo(
        boundaries=(1,),
        columns=("boundary:1", "final:pre_norm"),
        num_layers=3,
        hidden_size=HIDDEN,
        dtype=dtype,
        model_path="m",
        architecture="A",
        config_hash="c",
        final_norm_eps=1e-6,
        created_at="2025-01-01T00:00:00Z",
        sglang_version="0",
    )


class Engine:
    """Feeds a committer as forwards would: slots are given out once, states are functions of the prompt.

    ``store`` may wrap the store that the committer writes to.
    """

    def __init__(
        self,
        directory: Path,
        ring_bytes: int = 2**15,
        shard_bytes: int = 2**20,
        wrap: Callable[[StoreWriter], Any] = lambda store: store,
        dtype: str = "float32",
    ) -> None:
        info = make_info(dtype)
        self.row_bytes = info.row_bytes
        self.errors: list[Exception] = []
        self.commits: list[bool] = []
        memory = RingMemory.create(ring_bytes, info.row_bytes)
        self.memory, self.consumer = memory, Consumer(memory)
        self.staging = Staging(
            torch.device("cpu"), 8, COLUMNS, HIDDEN, TORCH_DTYPES[dtype], Producer(memory, check_consumer=lambda: None)
        )
        self.store = StoreWriter.open(
            directory, "dp0-pp0", info, session_id="s", shard_bytes=shard_bytes, min_free_bytes=0
        )
        self.committer = Committer(
            wrap(self.store),
            commit_interval_s=0.02,
            placeholder=[0],
            media_token=PAD,
            on_commit=self.commits.append,
            on_error=self.errors.append,
        )
        self.slots: dict[str, list[int]] = {}
        self.images: dict[str, Any] = {}
        self.next_slot = 1
        self.prefills = 0

    @staticmethod
    def states(prompt: list[int]) -> torch.Tensor:
        """``[S, C, H]``: something that depends on the token and on its place."""
        ids = torch.tensor(prompt, dtype=torch.float32).view(-1, 1, 1)
        place = torch.arange(1, len(prompt) + 1).view(-1, 1, 1)
        return (ids + place / 1000) * torch.arange(1, COLUMNS * HIDDEN + 1).view(1, COLUMNS, HIDDEN)

    def forward(self, parts: list[tuple[str, list[int], int, int]], spoil: dict[tuple[str, int], float] | None = None):
        """Run one prefill forward of ``(rid, prompt, start, end)`` parts; ``spoil`` puts a value into a row."""
        self.prefills += 1
        tokens, slots, rows = [], [], []
        for rid, prompt, start, end in parts:
            mine = self.slots.setdefault(rid, [])
            fresh = list(range(self.next_slot, self.next_slot + end - start))
            self.next_slot += end - start
            mine[start:] = fresh
            tokens += prompt[start:end]
            slots += fresh
            part = self.states(prompt)[start:end].clone()
            for (who, position), value in (spoil or {}).items():
                if who == rid and start <= position < end:
                    part[position - start] = value
            rows.append(part)
        batch = PrefillBatch(
            rids=[p[0] for p in parts],
            prefix_lens=[p[2] for p in parts],
            seq_lens=[p[3] - p[2] for p in parts],
            input_ids=torch.tensor(tokens),
            slots=torch.tensor(slots),
            prompt_lens=torch.tensor([len(p[1]) for p in parts]),
            req_pool_indices=torch.arange(len(parts)),
            mm_inputs=[self.images.get(p[0]) for p in parts] if self.images else None,
        )
        plan = plan_rows(batch, "hs-")
        if plan is None:
            return
        index = plan.row_index()
        packed = torch.cat(rows)
        packed = packed[: plan.n_rows] if index is None else packed[torch.from_numpy(index)]
        prefixes = [self.slots[r.rid][: r.prefix_len] for r in plan.requests]
        metadata = torch.tensor([*tokens, *slots, *(len(p[1]) for p in parts), *chain.from_iterable(prefixes)])
        staged = self.staging.begin(plan.n_rows)
        for column in range(COLUMNS):
            reference.pack_state(packed[:, column], None, staged.states, staged.absmax, column)
        header = BatchHeader(self.prefills, plan, len(tokens), len(parts))
        self.committer.begin(header, metadata.numpy(), staged.absmax.numpy())
        for piece in self.staging.send(staged.states):
            lease = self.consumer.lease(piece.span)
            data = self.consumer.data(piece.span)
            self.committer.take(data, len(data) // self.row_bytes, lease)
            lease.done()
        self.committer.tick()

    def tick_until(self, done: Callable[[], object], timeout_s: float = 10) -> None:
        """Let time pass."""
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline
            self.committer.tick()
            time.sleep(0.005)

    def finish(self) -> None:
        self.committer.finish()


def read_samples(directory: Path, tensor: str = "hidden_states") -> dict[str, torch.Tensor]:
    """The states of each acknowledged request, or its rows of another tensor, put together as its record says."""
    out = {}
    for sample in (record for record in journal(directory) if record["t"] == "sample"):
        parts = []
        for number, start, count in sample["extents"]:
            with safe_open(directory / "shards" / f"dp0-pp0-{number:06d}.safetensors", "pt") as shard:
                parts.append(shard.get_slice(tensor)[start : start + count])
        out[sample["rid"]] = torch.cat(parts)
    return out


def journal(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "journal-dp0-pp0.jsonl").read_text().splitlines()]


def test_chunks_and_mixed_batches_become_whole_samples(tmp_path):
    engine = Engine(tmp_path, shard_bytes=2**10)
    long, other, short = list(range(100, 150)), list(range(7, 20)), [3]
    engine.forward([("hs-long", long, 0, 20), ("x", [1, 2, 3], 0, 3)])
    engine.forward([("hs-long", long, 20, 37), ("hs-other", other, 0, 13)])
    engine.forward([("x2", [4] * 5, 0, 5), ("hs-long", long, 37, 50), ("hs-short", short, 0, 1)])
    engine.finish()
    assert not engine.errors
    samples = read_samples(tmp_path)
    assert set(samples) == {"hs-long", "hs-other", "hs-short"}
    for rid, prompt in (("hs-long", long), ("hs-other", other), ("hs-short", short)):
        assert torch.equal(samples[rid], Engine.states(prompt))
    ends = {r["rid"]: r["end_hash"] for r in journal(tmp_path) if r["t"] == "sample"}
    assert ends["hs-long"] == f"{end_hash(long):016x}"


def packed_in_float8(prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Float8 ``[S, C, H]`` and float32 ``[S, C]``: what must be stored of a prompt."""
    states = Engine.states(prompt)
    codes = torch.empty(states.shape, dtype=torch.float8_e4m3fn)
    absmax = torch.empty(states.shape[:2])
    for column in range(COLUMNS):
        reference.pack_state(states[:, column], None, codes, absmax, column)
    return codes, torch.from_numpy(scales_from_absmax(absmax.numpy()))


def test_rows_in_float8_are_stored_with_their_scales(tmp_path):
    """Also where a row is cut from a piece of its own, a run is broken by a bad row, and shards are filled."""
    engine = Engine(tmp_path, shard_bytes=2**7, dtype="float8_e4m3")
    long, other, bad, short = list(range(100, 150)), list(range(7, 20)), [5] * 6, [3]
    engine.forward([("hs-long", long, 0, 20), ("x", [1, 2, 3], 0, 3)])
    spoil = {("hs-bad", 2): float("inf")}
    engine.forward([("hs-long", long, 20, 37), ("hs-bad", bad, 0, 6), ("hs-other", other, 0, 13)], spoil)
    engine.forward([("x2", [4] * 5, 0, 5), ("hs-long", long, 37, 50), ("hs-short", short, 0, 1)])
    engine.finish()
    assert not engine.errors
    states, scales = read_samples(tmp_path), read_samples(tmp_path, "scales")
    assert set(states) == {"hs-long", "hs-other", "hs-short"}
    for rid, prompt in (("hs-long", long), ("hs-other", other), ("hs-short", short)):
        expected = packed_in_float8(prompt)
        assert torch.equal(states[rid].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(scales[rid], expected[1])


def test_a_shared_prefix_is_stored_once_and_linked_from_both(tmp_path):
    engine = Engine(tmp_path)
    first, second = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9, 9]
    rid = make_rid("hs-", sample_key("second"), 0, end_hash(second))
    engine.forward([("hs-first", first, 0, 6)])
    engine.slots[rid] = engine.slots["hs-first"][:4]
    engine.forward([(rid, second, 4, 7)])
    engine.finish()
    samples = read_samples(tmp_path)
    assert torch.equal(samples[rid], Engine.states(second))
    assert engine.store.rows == 9


def test_a_prefix_never_captured_is_reported_not_guessed(tmp_path):
    engine = Engine(tmp_path)
    prompt = [1, 2, 3, 4, 5]
    engine.slots["hs-a"] = [500, 501, 502]
    engine.forward([("hs-a", prompt, 3, 5)])
    engine.forward([("hs-b", prompt, 0, 5)])
    engine.finish()
    failures = [r for r in journal(tmp_path) if r["t"] == "failed"]
    assert [(r["rid"], r["reason"]) for r in failures] == [("hs-a", "incomplete")]
    assert engine.committer.tallies.incomplete == 1
    assert set(read_samples(tmp_path)) == {"hs-b"}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("dtype", "value", "reason"),
    [
        ("float32", NAN, "non_finite"),
        ("float32", INF, "non_finite"),
        ("float32", 0.0, "zero_row"),
        ("float8_e4m3", NAN, "non_finite"),
        ("float8_e4m3", -INF, "non_finite"),
        ("float8_e4m3", 0.0, "zero_row"),
        ("float8_e4m3", 1e-44, "zero_row"),  # its scale is 0
    ],
)
@pytest.mark.parametrize("position", [1, 6])
def test_a_bad_row_in_any_chunk_fails_its_sample_alone(tmp_path, dtype, value, reason, position):
    engine = Engine(tmp_path, dtype=dtype)
    bad, good = list(range(50, 59)), list(range(60, 69))
    for start, end in ((0, 4), (4, 9)):
        engine.forward(
            [("hs-bad", bad, start, end), ("hs-good", good, start, end)], spoil={("hs-bad", position): value}
        )
    engine.finish()
    failures = [r for r in journal(tmp_path) if r["t"] == "failed"]
    assert [(r["rid"], r["reason"]) for r in failures] == [("hs-bad", reason)]
    assert f"position {position}" in failures[0]["detail"]
    samples = read_samples(tmp_path)
    assert set(samples) == {"hs-good"}
    expected = Engine.states(good) if dtype == "float32" else packed_in_float8(good)[0]
    assert torch.equal(samples["hs-good"].view(torch.uint8), expected.view(torch.uint8))


def test_the_placeholder_of_a_refused_prompt_is_no_sample(tmp_path):
    engine = Engine(tmp_path)
    engine.forward([("hs-refused", [0], 0, 1), ("hs-one", [7], 0, 1), ("hs-zeros", [0, 0], 0, 2)])
    engine.finish()
    assert set(read_samples(tmp_path)) == {"hs-one", "hs-zeros"}
    assert [(r["rid"], r["reason"]) for r in journal(tmp_path) if r["t"] == "failed"] == [("hs-refused", "refused")]


def test_an_aborted_request_leaves_rows_and_no_sample(tmp_path):
    engine = Engine(tmp_path)
    engine.forward([("hs-gone", list(range(30)), 0, 10)])
    engine.forward([("hs-b", [5, 6], 0, 2)])
    engine.finish()
    assert set(read_samples(tmp_path)) == {"hs-b"}


def test_an_id_used_again_after_an_abort_gets_no_rows_of_the_first_request(tmp_path):
    """Its slots were freed and filled with another prompt's rows, unseen; the id says nothing of the prompt."""
    engine = Engine(tmp_path)
    first, second = list(range(40)), [*range(50, 70), 1, 2]
    engine.forward([("hs-1", first, 0, 20)])
    engine.forward([("other", second[:20], 0, 20)])
    engine.forward([("hs-1", second, 20, 22)])
    engine.forward([("hs-2", second, 0, 22)])
    engine.finish()
    assert set(read_samples(tmp_path)) == {"hs-2"}
    (failed,) = [r for r in journal(tmp_path) if r["t"] == "failed"]
    assert (failed["rid"], failed["reason"]) == ("hs-1", "incomplete")
    assert "used before" in failed["detail"]


class Failing:
    """A store whose appends fail from now on with ``error``; all else goes to the real one."""

    def __init__(self, store: StoreWriter) -> None:
        self.store, self.error = store, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def append(self, *args: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self.store.append(*args)


def failing_engine(directory: Path) -> tuple[Engine, Failing]:
    stores: list[Failing] = []

    def wrap(store: StoreWriter) -> Failing:
        stores.append(Failing(store))
        return stores[0]

    return Engine(directory, wrap=wrap), stores[0]


def test_a_report_that_cannot_be_written_is_tried_again_and_room_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(committer_module, "_IDLE_S", 0.05)
    (engine, store), told = failing_engine(tmp_path), []

    def tell(error):
        told.append(error)
        if len(told) < 3:
            raise DiskFullError("no room for the record either")

    monkeypatch.setattr(engine.committer, "_on_error", tell)
    store.error = DiskFullError("the disk is full")
    for _ in range(2 * 2**15 // (40 * HIDDEN * COLUMNS * 4)):
        engine.forward([("hs-lost", list(range(40)), 0, 40)])  # twice what the ring holds
    engine.tick_until(lambda: len(told) >= 3)
    time.sleep(0.1)
    assert engine.committer.tick() is None, "nothing more to tell"
    assert len(told) == 3
    engine.finish()


def test_samples_are_acknowledged_without_a_stop(tmp_path):
    engine = Engine(tmp_path)
    engine.forward([("hs-b", [5, 6], 0, 2)])
    engine.tick_until(lambda: any(r["t"] == "sample" for r in journal(tmp_path)))
    engine.tick_until(lambda: engine.committer.tallies.samples == 1)
    engine.tick_until(lambda: engine.commits[-1:] == [True])
    assert engine.committer.tick() is None, "nothing is due"
    engine.finish()


def test_a_full_disk_stops_capture_and_keeps_samples(tmp_path):
    engine, store = failing_engine(tmp_path)
    engine.forward([("hs-kept", [5, 6, 7], 0, 3)])
    store.error = DiskFullError("the disk is full")
    engine.forward([("hs-lost", list(range(40)), 0, 40)])
    store.error = None
    engine.forward([("hs-too-late", list(range(40)), 0, 40)])
    engine.finish()
    assert [type(error) for error in engine.errors] == [DiskFullError]
    assert {r["rid"] for r in journal(tmp_path) if r["t"] == "sample"} == {"hs-kept"}


def test_chunks_of_a_pipeline_may_have_forwards_of_other_captured_requests_between(tmp_path):
    """With pipeline parallelism two batches of requests take turns."""
    engine = Engine(tmp_path)
    one, other = list(range(30)), list(range(50, 80))
    for start in (0, 10, 20):
        engine.forward([("hs-1", one, start, start + 10)])
        engine.forward([("hs-2", other, start, start + 10)])
    engine.forward([("hs-3", one, 0, 10)])
    engine.forward([("hs-4", other, 0, 10), ("x", [1], 0, 1)])
    engine.forward([("hs-3", one, 10, 30)])
    engine.finish()
    samples = read_samples(tmp_path)
    assert set(samples) == {"hs-1", "hs-2"}
    assert torch.equal(samples["hs-1"], Engine.states(one))
    assert torch.equal(samples["hs-2"], Engine.states(other))
    (failed,) = [r for r in journal(tmp_path) if r["t"] == "failed"]
    assert failed["rid"] == "hs-3", "a request that was not captured came between"


def test_many_short_prompts_in_a_batch_are_one_write(tmp_path):
    writes = []

    class Counting(Failing):
        def append(self, *args: Any) -> Any:
            writes.append(len(args[1]))
            return self.store.append(*args)

    engine = Engine(tmp_path, wrap=Counting, shard_bytes=7 * HIDDEN * COLUMNS * 4)
    prompts = {f"hs-{n}": [n, n + 1, n + 2] for n in range(1, 9)}
    spoil = {("hs-4", 1): float("nan")}
    engine.forward([(rid, prompt, 0, 3) for rid, prompt in prompts.items()], spoil=spoil)
    engine.finish()
    assert writes == [9, 12], "before the spoilt one, and behind it"
    samples = read_samples(tmp_path)
    assert set(samples) == set(prompts) - {"hs-4"}
    for rid, states in samples.items():
        assert torch.equal(states, Engine.states(prompts[rid]))


def test_a_prompt_that_builds_on_rewritten_slots_is_refused_and_taints_nobody(tmp_path):
    """A slot of the prefix holds another prompt's row; the request's own rows then claim a hash that is not theirs."""
    engine = Engine(tmp_path)
    old, new = [1, 2, 3, 4], [1, 2, 9, 9, 6, 6]
    engine.forward([("hs-old", old, 0, 4)])
    # Decode, unseen, has put 9, 9 where 3, 4 were; the new prompt hits the cache on 1, 2, 9, 9.
    engine.slots["hs-by-hand"] = list(engine.slots["hs-old"])
    engine.forward([("hs-by-hand", new, 4, 6)])
    rid = make_rid("hs-", sample_key("new"), 0, end_hash(new))
    engine.slots[rid] = list(engine.slots["hs-old"])
    engine.forward([(rid, new, 4, 6)])
    # Whoever comes across the rows of the refused request must not take them for those of 1, 2, 3, 4, 6, 6.
    victim = [1, 2, 3, 4, 6, 6, 5]
    name = make_rid("hs-", sample_key("victim"), 0, end_hash(victim))
    engine.slots[name] = list(engine.slots[rid])
    engine.forward([(name, victim, 6, 7)])
    engine.finish()
    assert set(read_samples(tmp_path)) == {"hs-old"}
    failed = {r["rid"]: (r["reason"], r["detail"]) for r in journal(tmp_path) if r["t"] == "failed"}
    assert {reason for reason, _ in failed.values()} == {"incomplete"}
    assert "sent by hand" in failed["hs-by-hand"][1]
    assert "another prompt" in failed[rid][1]
    assert "never captured" in failed[name][1]


LEADER, FOLLOWER = list(range(20)), [*range(10), 77]


def name_of(key: str, prompt: list[int], attempt: int = 0) -> str:
    return make_rid("hs-", sample_key(key), attempt, end_hash(prompt))


def borrow(engine: Engine, leader: str = name_of("leader", LEADER)) -> str:
    """The first half of the leader, and a follower that takes its rows from the cache meanwhile."""
    follower = name_of("follower", FOLLOWER)
    engine.forward([(leader, LEADER, 0, 10)])
    engine.slots[follower] = engine.slots[leader][:10]
    engine.forward([(follower, FOLLOWER, 10, 11)])
    return follower


def test_a_borrowed_prefix_waits_for_its_lender(tmp_path):
    engine, leader = Engine(tmp_path), name_of("leader", LEADER)
    follower = borrow(engine)
    engine.tick_until(lambda: len(engine.commits) > 1)
    assert not any(r["t"] in ("sample", "failed") for r in journal(tmp_path))
    engine.forward([(leader, LEADER, 10, 20)])
    engine.finish()
    samples = read_samples(tmp_path)
    assert set(samples) == {leader, follower}
    assert torch.equal(samples[follower], Engine.states(FOLLOWER))
    assert engine.store.rows == 21


def test_a_lender_and_its_borrower_may_end_in_one_batch(tmp_path):
    engine, leader, follower = Engine(tmp_path), name_of("leader", LEADER), name_of("follower", FOLLOWER)
    engine.forward([(leader, LEADER, 0, 10)])
    engine.slots[follower] = engine.slots[leader][:10]
    engine.forward([(follower, FOLLOWER, 10, 11), (leader, LEADER, 10, 20)])
    engine.finish()
    samples = read_samples(tmp_path)
    assert set(samples) == {leader, follower}
    assert torch.equal(samples[follower], Engine.states(FOLLOWER))


def test_a_lender_that_is_refuted_takes_its_borrower_along(tmp_path):
    engine = Engine(tmp_path)
    wrong = make_rid("hs-", sample_key("leader"), 0, 12345)
    follower = borrow(engine, wrong)
    engine.forward([(wrong, LEADER, 10, 20)])
    again = name_of("follower", FOLLOWER, 1)
    engine.forward([(again, FOLLOWER, 0, 11)])
    engine.finish()
    assert {r["rid"]: r["reason"] for r in journal(tmp_path) if r["t"] == "failed"} == {
        wrong: "incomplete",
        follower: "incomplete",
    }
    assert set(read_samples(tmp_path)) == {again}


def test_a_lender_that_never_ends_is_not_waited_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(committer_module, "_LENDER_PATIENCE_S", 0.3)
    monkeypatch.setattr(committer_module, "_IDLE_S", 0.1)
    engine = Engine(tmp_path)
    follower = borrow(engine)
    engine.tick_until(lambda: any(r["t"] == "failed" for r in journal(tmp_path)))
    engine.finish()
    failed = [r for r in journal(tmp_path) if r["t"] == "failed"]
    assert [(r["rid"], r["reason"]) for r in failed] == [(follower, "incomplete")]
    assert read_samples(tmp_path) == {}


def image_prompt(image: int) -> tuple[list[int], Any]:
    """A prompt of 12 tokens whose positions 3 to 7 are an image, and what SGLang has of it: ids in turn."""
    ids = (image, image + 1)
    item = SimpleNamespace(padding_values=lambda: ids, offsets=[(3, 7)])
    return [5, 6, 7, *(ids[i % 2] for i in range(5)), 8, 9, 10, 11], SimpleNamespace(mm_items=[item])


IMAGE_TEXT = [5, 6, 7, PAD, 8, 9, 10, 11]


def image_rid(name: str) -> str:
    return make_rid("hs-", sample_key(name), 0, end_hash(IMAGE_TEXT))


@pytest.mark.parametrize("cuts", [[0, 12], [0, 2, 12], [0, 5, 9, 12]])
def test_a_prompt_with_an_image_is_proven_by_its_text(tmp_path, cuts):
    engine, rid = Engine(tmp_path), image_rid("a")
    prompt, engine.images[rid] = image_prompt(10**15)
    for start, end in pairwise(cuts):
        engine.forward([("x", [1], 0, 1), (rid, prompt, start, end)])
    engine.finish()
    [sample] = [record for record in journal(tmp_path) if record["t"] == "sample"]
    assert sample["media"] == {"runs": [[3, 5]], "token": PAD, "prompt_hash": f"{end_hash(IMAGE_TEXT):016x}"}
    assert sample["end_hash"] == f"{end_hash(prompt):016x}"
    assert read_samples(tmp_path, "input_ids")[rid].tolist() == prompt


def test_rows_of_another_image_in_the_same_text_are_not_linked(tmp_path):
    """A slot that was rewritten unseen: the text's hash agrees, and the rows are another image's."""
    engine, own, same, other = Engine(tmp_path), image_rid("own"), image_rid("same"), image_rid("other")
    prompt, engine.images[own] = image_prompt(10**15)
    engine.forward([(own, prompt, 0, 12)])
    _, engine.images[same] = image_prompt(10**15)
    engine.slots[same] = engine.slots[own][:9]
    engine.forward([(same, prompt, 9, 12)])
    different, engine.images[other] = image_prompt(10**16)
    engine.slots[other] = engine.slots[own][:9]
    engine.forward([(other, different, 9, 12)])
    engine.finish()
    assert set(read_samples(tmp_path)) == {own, same}
    assert torch.equal(read_samples(tmp_path)[same], Engine.states(prompt))
    [failed] = [record for record in journal(tmp_path) if record["t"] == "failed"]
    assert failed["rid"] == other
    assert failed["reason"] == "incomplete"
    assert "computed from another image" in failed["detail"]


def test_another_text_with_the_same_image_is_not_acknowledged(tmp_path):
    engine, rid = Engine(tmp_path), make_rid("hs-", sample_key("a"), 0, end_hash([*IMAGE_TEXT[:-1], 12]))
    prompt, engine.images[rid] = image_prompt(10**15)
    engine.forward([(rid, prompt, 0, 12)])
    engine.finish()
    assert [record["reason"] for record in journal(tmp_path) if record["t"] == "failed"] == ["incomplete"]
    assert not read_samples(tmp_path)


def test_a_request_with_an_image_sent_by_hand_says_where_it_is(tmp_path):
    engine = Engine(tmp_path)
    prompt, engine.images["hs-by-hand"] = image_prompt(10**15)
    engine.forward([("hs-by-hand", prompt, 0, 12)])
    engine.finish()
    [sample] = [record for record in journal(tmp_path) if record["t"] == "sample"]
    assert sample["media"]["runs"] == [[3, 5]]
