"""Several servers: prefixes meet, work is spread, and what a lost server had goes to the others."""

import asyncio
import random
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from sglang_hs_capture.driver import delivery, pump
from sglang_hs_capture.driver import pool as pool_module
from sglang_hs_capture.driver.delivery import DeliverySettings
from sglang_hs_capture.driver.pool import ServerPool, wait_for_any
from sglang_hs_capture.driver.pump import PumpSettings
from sglang_hs_capture.driver.run import CaptureRun, RunSettings
from sglang_hs_capture.driver.summary import Summary
from sglang_hs_capture.driver.target import RunningServers
from sglang_hs_capture.errors import EngineError
from sglang_hs_capture.store.index import load_index
from tests.unit.fake_server import FakeServer, Lines, make_sample


def in_a_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Run a coroutine test."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Client:
    """Plays one server's client; a prompt stays in flight until ``finish``."""

    def __init__(self, name: str) -> None:
        self.url, self.up = name, True
        self.sent: list[list[int]] = []
        self.gate = asyncio.Event()

    async def prefill(self, rid: str, input_ids: list[int], **_: object) -> None:
        if not self.up:
            raise ConnectionError(f"{self.url} is gone")
        self.sent.append(list(input_ids))
        await self.gate.wait()

    async def healthy(self) -> bool:
        return self.up

    async def wait_healthy(self, grace_s: float) -> bool:
        while not self.up and grace_s > 0:
            await asyncio.sleep(0.01)
            grace_s -= 0.01
        return self.up

    async def close(self) -> None:
        self.up = False


def tokens(seed: int, count: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(1000) for _ in range(count)]


async def send(pool: ServerPool, prompts: list[list[int]]) -> list[asyncio.Task[None]]:
    tasks = []
    for number, prompt in enumerate(prompts):
        tasks.append(asyncio.create_task(pool.prefill(f"hs-{number}", prompt)))
        await asyncio.sleep(0)
    return tasks


@in_a_loop
async def test_prompts_without_a_prefix_in_common_are_spread_by_tokens():
    clients = [Client(name) for name in "abc"]
    pool = ServerPool(clients)
    tasks = await send(pool, [tokens(n, 200) for n in range(30)])
    assert [len(client.sent) for client in clients] == [10, 10, 10]
    for client in clients:
        client.gate.set()
    await asyncio.gather(*tasks)


@in_a_loop
async def test_a_shared_prefix_goes_to_one_server_until_it_has_much_more_to_do(monkeypatch):
    monkeypatch.setattr(pool_module, "SLACK_TOKENS", 3000)
    clients = [Client(name) for name in "ab"]
    pool = ServerPool(clients)
    trees = [tokens(n, 300) for n in range(2)]
    prompts = [trees[n % 2] + tokens(100 + n, 50) for n in range(16)]
    tasks = await send(pool, prompts)
    for client, tree in zip(clients, trees, strict=True):
        assert [prompt[:300] for prompt in client.sent] == [tree] * 8
    tasks += await send(pool, [trees[0] + tokens(500 + n, 50) for n in range(20)])
    moved = [prompt for prompt in clients[1].sent if prompt[:300] == trees[0]]
    assert 0 < len(moved) < 20
    for client in clients:
        client.gate.set()
    await asyncio.gather(*tasks)


@in_a_loop
async def test_the_longest_prefix_decides():
    clients = [Client(name) for name in "ab"]
    pool = ServerPool(clients)
    system, first, second = tokens(0, 128), tokens(1, 128), tokens(2, 128)
    tasks = await send(pool, [system + first + tokens(3, 9)])
    pool._servers[1].remember(pool_module._block_hashes(system + second))
    tasks += await send(pool, [system + second + tokens(4, 9), system + first + tokens(5, 9)])
    assert [len(client.sent) for client in clients] == [2, 1]
    assert clients[1].sent[0][128:256] == second
    for client in clients:
        client.gate.set()
    await asyncio.gather(*tasks)


@in_a_loop
async def test_a_lost_server_gets_nothing_until_it_is_back(monkeypatch):
    monkeypatch.setattr(pool_module, "RETRY_PAUSE_S", 0.01)
    clients = [Client(name) for name in "ab"]
    pool = ServerPool(clients)
    for client in clients:
        client.gate.set()
    clients[0].up = False
    with pytest.raises(ConnectionError):
        await pool.prefill("hs-1", [1, 2])
    for _ in range(5):
        await pool.prefill("hs-1", [1, 2])
    assert len(clients[1].sent) == 5
    assert await pool.healthy()
    clients[0].up = True
    await asyncio.sleep(0.1)
    await pool.prefill("hs-2", tokens(1, 100))
    assert len(clients[0].sent) == 1
    await pool.close()


@in_a_loop
async def test_one_healthy_server_is_enough_to_go_on():
    slow, quick = Client("a"), Client("b")
    slow.up = False
    assert await wait_for_any([slow, quick], 5)
    quick.up = False
    assert not await wait_for_any([slow, quick], 0.05)


async def opened(servers: list[FakeServer], directory: Path) -> tuple[Any, Lines]:
    lines = Lines()
    target = RunningServers([s.url for s in servers], directory, expected=lambda info: [], api_key=None, grace_s=2.0)
    try:
        return await target.open(lines.say), lines
    finally:
        await target.close()


@in_a_loop
async def test_servers_of_one_dataset_are_opened_together(tmp_path):
    async with FakeServer(tmp_path) as first, FakeServer(tmp_path, writer="dp1-pp0") as second:
        sessions, lines = await opened([first, second], tmp_path)
    assert [record.writer for record in sessions] == ["dp0-pp0", "dp1-pp0"]
    assert first.url in lines.said[0]
    assert second.url in lines.said[0]


@in_a_loop
async def test_servers_under_one_name_are_refused(tmp_path):
    """The second server's capture was refused by the dataset's lock, though it serves."""
    async with FakeServer(tmp_path) as first, FakeServer(tmp_path / "other") as second:
        second.directory = tmp_path
        with pytest.raises(EngineError, match=r"expected 2 servers .* found dp0; start each with"):
            await opened([first, second], tmp_path)


@in_a_loop
async def test_a_server_whose_stage_is_missing_is_refused(tmp_path):
    async with FakeServer(tmp_path) as first, FakeServer(tmp_path, writer="dp1-pp0") as second:
        second.record.columns = ["boundary:1"]
        second.stop_capture("x")
        with pytest.raises(EngineError, match="no process of dp1 captures final:pre_norm"):
            await opened([first, second], tmp_path)


def test_a_run_goes_on_when_one_of_its_servers_is_lost_and_when_it_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(delivery, "RESEND_PAUSE_S", 0.01)
    monkeypatch.setattr(pool_module, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(pump, "WATCH_INTERVAL_S", 0.01)
    names = [f"s{i}" for i in range(60)]
    samples = [make_sample(name, line=line) for line, name in enumerate(names, start=1)]

    async def main() -> tuple[Summary, FakeServer, FakeServer]:
        async def lose_and_return(first: FakeServer) -> None:
            while len(first.requests) < 5:
                await asyncio.sleep(0.001)
            await first.go_away()
            await asyncio.sleep(0.3)
            await first.come_back()

        cut = [3, 4]
        async with (
            FakeServer(tmp_path, lambda number, rid: "cut" if number in cut else "ok") as first,
            FakeServer(tmp_path, writer="dp1-pp0") as second,
        ):
            urls = [first.url, second.url]
            target = RunningServers(urls, tmp_path, expected=lambda info: [], api_key=None, grace_s=2.0)
            settings = RunSettings(
                tmp_path,
                delivery=DeliverySettings(attempts=3, ack_timeout_s=1.0, grace_s=5.0),
                pump=PumpSettings(max_prompts=4),
            )
            beside = asyncio.ensure_future(lose_and_return(first))
            summary = await asyncio.wait_for(CaptureRun(target, samples, settings, Lines()).run(), 30)
            await beside
            return summary, first, second

    summary, first, second = asyncio.run(main())
    assert (summary.captured, summary.dropped, summary.exit_code) == (60, [], 0)
    index = load_index(tmp_path)
    assert sorted(sample.id for sample in index.samples) == sorted(names)
    assert {sample.parts[0].writer for sample in index.samples} == {"dp0-pp0", "dp1-pp0"}
    assert len(first.requests) + len(second.requests) >= 62, "what was cut was not sent again"
