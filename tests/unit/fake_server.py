"""A server that plays SGLang with the capture plugin: it answers ``/generate`` and writes a real dataset."""

import asyncio
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
from aiohttp import web

from sglang_hs_capture.data.records import Sample
from sglang_hs_capture.driver.progress import ProgressView
from sglang_hs_capture.store.hashing import end_hash, prefix_hashes
from sglang_hs_capture.store.identity import model_identity
from sglang_hs_capture.store.schema import DatasetInfo
from sglang_hs_capture.store.session import Counters, SessionRecord, write_session
from sglang_hs_capture.store.writer import StoreWriter

SLOW_S = 0.3

INFO = DatasetInfo(
    boundaries=(1,),
    columns=("boundary:1", "final:pre_norm"),
    num_layers=4,
    hidden_size=2,
    dtype="float32",
    model_path="/models/tiny",
    architecture="DeepseekV3ForCausalLM",
    config_hash="0" * 64,
    final_norm_eps=1e-6,
    created_at="2025-01-01T00:00:00.000Z",
    sglang_version="0.5.23",
)


def make_sample(name: str, length: int = 5, line: int = 1) -> Sample:
    """A sample whose tokens follow from its name."""
    ids = np.frombuffer((name * length).encode()[:length], dtype=np.uint8).astype(np.int64)
    mask = np.zeros(length, dtype=np.uint8)
    mask[length // 2 :] = 1
    return Sample(name, f"data.jsonl:{line}", ids, mask)


class FakeServer:
    """Serves on a free port of this machine, in the running event loop.

    ``behave`` gets each request's number and rid, and says what happens to it: ``ok``, ``mismatch`` (states of other
    tokens are stored), ``failed`` (the journal says so), ``silent`` (never acknowledged), ``refuse`` (HTTP 400),
    ``no_logprobs`` (likewise, only where log-probabilities are asked for), ``error`` (HTTP 500), ``busy`` (HTTP 503),
    ``cut`` (the connection breaks), ``late`` (acknowledged when the next request comes), ``slow`` (``ok`` after a
    while).
    """

    shard_bytes = 2**20

    def __init__(
        self,
        directory: Path,
        behave: Callable[[int, str], str] = lambda number, rid: "ok",
        writer: str = "dp0-pp0",
    ) -> None:
        self.directory = directory
        self.behave = behave
        self.requests: list[str] = []
        self.generated: list[dict[str, Any]] = []
        self.flushes = 0
        self.ranks = 1
        self.info: dict[str, Any] | None = None  # in the place of its own account of its settings
        self.url = ""
        self.record = SessionRecord(
            writer=writer,
            session_id="5e55" * 8,
            pid=os.getpid(),
            host=socket.gethostname(),
            state="ready",
            rid_prefix="hs-",
            max_prompt_tokens=100,
            model=model_identity(INFO),
            counters=Counters(rows=1000, blocked_s=5.0),
        )
        self._late: list[tuple[str, list[int]]] = []

    async def __aenter__(self) -> Self:
        self.store = StoreWriter.open(
            self.directory,
            self.record.writer,
            INFO,
            session_id=self.record.session_id,
            shard_bytes=self.shard_bytes,
            min_free_bytes=0,
        )
        write_session(self.directory, self.record)
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._info)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/flush_cache", self._flush)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await self._listen(0)
        return self

    async def _listen(self, port: int) -> None:
        self._site = web.TCPSite(self._runner, "127.0.0.1", port)
        await self._site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        self.store.close()

    async def go_away(self) -> None:
        """Stop listening; what is connected stays."""
        await self._site.stop()

    async def come_back(self) -> None:
        """Listen again where it did before."""
        await self._listen(int(self.url.rpartition(":")[2]))

    def stop_capture(self, reason: str, kind: str | None = None) -> None:
        """Say in the session record that capture has ended; ``kind`` is the error's class."""
        self.record.state, self.record.error, self.record.error_kind = "stopped", reason, kind
        write_session(self.directory, self.record)

    def start_anew(self) -> None:
        """Say in the session record that another process captures here now."""
        self.record.session_id = f"{int(self.record.session_id, 16) + 1:032x}"
        self.record.state, self.record.error, self.record.error_kind = "ready", None, None
        self.record.counters = Counters()
        write_session(self.directory, self.record)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _flush(self, _: web.Request) -> web.Response:
        # SGLang refuses as long as a request is not wholly done.
        self.flushes += 1
        return web.Response(status=200 if self.flushes > 1 else 400)

    async def _info(self, _: web.Request) -> web.Response:
        replica = int(self.record.writer.removeprefix("dp").partition("-")[0])
        overrides = {"hs_capture": {"output_dir": str(self.directory), "replica": replica}}
        info = {"json_model_override_args": json.dumps(overrides), "dp_size": self.ranks}
        return web.json_response(info if self.info is None else self.info)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        rid, ids = body["rid"], body["input_ids"]
        number = len(self.requests)
        self.requests.append(rid)
        action = self.behave(number, rid)
        if action == "slow":
            await asyncio.sleep(SLOW_S)
        for late_rid, late_ids in self._late:
            self.capture(late_rid, late_ids)
        self._late.clear()
        if action == "cut":
            request.transport.abort()
        if action == "refuse" or (action == "no_logprobs" and body.get("return_logprob")):
            return web.json_response({"error": {"message": "The input is not to my liking."}}, status=400)
        if action == "busy":
            return web.Response(status=503)
        if action == "error":
            return web.json_response({"error": {"message": "out of luck"}}, status=500)
        if action == "late":
            self._late.append((rid, ids))
        if action == "failed":
            self.store.add_failure(rid, "non_finite", "state 0 at position 3")
            self.store.commit()
        if body["sampling_params"]["max_new_tokens"]:
            return web.json_response(self.answer(action, body))
        if action in {"ok", "no_logprobs", "slow", "mismatch"}:
            self.capture(rid, [*ids[:-1], ids[-1] + 1] if action == "mismatch" else ids)
        await asyncio.sleep(0)
        meta = {"prompt_tokens": len(ids)}
        if body.get("return_logprob"):
            meta |= predictions(ids[body["logprob_start_len"] :])
        return web.json_response({"output_ids": [], "meta_info": meta})

    def answer(self, action: str, body: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request that generates: the prompt backwards, ended by a stop token that is not shown."""
        self.generated.append(body)
        length = body["sampling_params"]["max_new_tokens"]
        finish = {"type": "abort"} if action == "abort" else {"type": "length", "length": length}
        tokens = body["input_ids"][::-1][:length]
        if action != "abort" and len(tokens) < length:
            finish = {"type": "stop", "matched": 99}
        return {"output_ids": tokens, "meta_info": {"finish_reason": finish}}

    def capture(self, rid: str, ids: list[int]) -> None:
        """Store rows for these tokens and acknowledge them."""
        self.keep(rid, ids)
        self.store.commit()

    def keep(self, rid: str, ids: list[int]) -> None:
        """Store rows for these tokens, to be acknowledged with the next commit."""
        tokens = np.array(ids, dtype=np.int64)
        rows = np.zeros(len(ids) * INFO.row_bytes, dtype=np.uint8)
        extents = self.store.append(rows, tokens, np.arange(len(ids)), prefix_hashes(tokens, 0, 0))
        self.store.add_sample(rid, len(ids), extents, end_hash(tokens))


def predictions(ids: list[int]) -> dict[str, Any]:
    """What SGLang's replies have of a prompt's last tokens; the log-probability of token t is said to be -t / 8."""
    shown = [[-token / 8, token, None] for token in ids[1:]]
    top = [[[-0.5, token + 1, None]] for token in ids[1:]]
    return {"input_token_logprobs": [[None, ids[0], None], *shown], "input_top_logprobs": [None, *top]}


class Lines(ProgressView):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.snapshots: list[Any] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def update(self, snapshot: Any) -> None:
        self.snapshots.append(snapshot)
