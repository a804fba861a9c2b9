"""Several servers: prefixes meet, work is spread, and what a lost server had goes to the others."""

import asyncio
import json
import random
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sglang_hs_capture.driver import delivery, pump
from sglang_hs_capture.driver import pool as pool_module
from sglang_hs_capture.driver.delivery import DeliverySettings
from sglang_hs_capture.driver.pool import MovedError, Server, ServerPool, wait_for_any
from sglang_hs_capture.driver.pump import PumpSettings
from sglang_hs_capture.driver.run import CaptureRun, RunSettings
from sglang_hs_capture.driver.summary import Summary
from sglang_hs_capture.driver.target import RunningServers
from sglang_hs_capture.errors import DiskFullError, EngineError, StoreError
from sglang_hs_capture.store.index import load_index
from sglang_hs_capture.store.session import write_session
from tests.unit.fake_server import FakeServer, Lines, make_sample


def in_a_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Run a coroutine test."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Client:
    """Plays one server's client; a prompt stays in flight until the gate is opened."""

    def __init__(self, name: str) -> None:
        self.url, self.up, self.leaving = name, True, False
        self.sent: list[list[int]] = []
        self.gate = asyncio.Event()

    async def prefill(self, input_ids: list[int]) -> str:
        if not self.up:
            raise ConnectionError(f"{self.url} is gone")
        self.sent.append(list(input_ids))
        await self.gate.wait()
        return self.url

    async def healthy(self) -> bool:
        return self.up

    async def answers(self) -> bool:
        return self.up

    async def shuts_down(self) -> bool:
        return self.leaving

    async def wait_healthy(self, grace_s: float) -> bool:
        while not self.up and grace_s > 0:
            await asyncio.sleep(0.01)
            grace_s -= 0.01
        return self.up

    async def close(self) -> None:
        self.up = False


def pool_of(clients: list[Client], say: Callable[[str], None] = lambda text: None) -> ServerPool:
    return ServerPool([Server(client, frozenset({f"dp{n}"})) for n, client in enumerate(clients)], say)


def serve(pool: ServerPool, prompt: list[int]) -> Any:
    return pool.serve(prompt, lambda client: client.prefill(prompt), set())


def tokens(seed: int, count: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(1000) for _ in range(count)]


async def send(pool: ServerPool, prompts: list[list[int]]) -> list[asyncio.Task[str]]:
    tasks = []
    for prompt in prompts:
        tasks.append(asyncio.create_task(serve(pool, prompt)))
        await settle()
    return tasks


async def assert_it_answers(pool: ServerPool, client: Client) -> None:
    """The next prompt goes to this server, which answers it."""
    (task,) = await send(pool, [tokens(1, 10)])
    client.gate.set()
    assert await task == client.url


async def settle() -> None:
    """Let everything that can go on go on."""
    for _ in range(5):
        await asyncio.sleep(0)


@in_a_loop
async def test_prompts_without_a_prefix_in_common_are_spread_by_tokens():
    clients = [Client(name) for name in "abc"]
    pool = pool_of(clients)
    tasks = await send(pool, [tokens(n, 200) for n in range(30)])
    assert [len(client.sent) for client in clients] == [10, 10, 10]
    for client in clients:
        client.gate.set()
    await asyncio.gather(*tasks)


@in_a_loop
async def test_a_shared_prefix_goes_to_one_server_until_it_has_much_more_to_do(monkeypatch):
    monkeypatch.setattr(pool_module, "SLACK_TOKENS", 3000)
    clients = [Client(name) for name in "ab"]
    pool = pool_of(clients)
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
async def test_a_server_that_has_its_share_of_prompts_gets_no_more():
    clients = [Client(name) for name in "ab"]
    pool = pool_of(clients)
    pool.max_prompts = 3
    prefix = tokens(0, 64)
    tasks = await send(pool, [prefix + tokens(n, 10) for n in range(6)])
    assert [len(client.sent) for client in clients] == [3, 3], "although they share a prefix"
    tasks += await send(pool, [prefix, prefix])
    assert sum(len(client.sent) for client in clients) == 8, "what is more than all shares is not held up"
    for client in clients:
        client.gate.set()
    await asyncio.gather(*tasks)


@in_a_loop
async def test_the_longest_prefix_decides():
    clients = [Client(name) for name in "ab"]
    pool = pool_of(clients)
    system, first, second = tokens(0, 128), tokens(1, 128), tokens(2, 128)
    tasks = await send(pool, [system + first + tokens(3, 9)])
    pool.servers[1].remember(pool_module._block_hashes(system + second))
    tasks += await send(pool, [system + second + tokens(4, 9), system + first + tokens(5, 9)])
    assert [len(client.sent) for client in clients] == [2, 1]
    assert clients[1].sent[0][128:256] == second
    for client in clients:
        client.gate.set()
    await asyncio.gather(*tasks)


def test_the_prefixes_of_many_servers_fit_into_memory():
    server = Server(None)
    tracemalloc.start()
    try:
        for first in range(1, 2**18, 2**10):
            server.remember(range(first * 2**40, (first + 2**10) * 2**40, 2**40))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 64 * taken < 2**31
    assert server.known([(2**18 - 1) * 2**40]) == 1
    assert server.known([2**40]) == 0


@in_a_loop
async def test_a_lost_server_gets_nothing_until_it_is_back(monkeypatch):
    monkeypatch.setattr(pool_module, "RETRY_PAUSE_S", 0.01)
    clients = [Client(name) for name in "ab"]
    pool = pool_of(clients)
    for client in clients:
        client.gate.set()
    clients[0].up = False
    with pytest.raises(ConnectionError):
        await serve(pool, [1, 2])
    for _ in range(5):
        await serve(pool, [1, 2])
    assert len(clients[1].sent) == 5
    assert await pool.wait_healthy(0)
    clients[0].up = True
    await asyncio.sleep(0.1)
    await serve(pool, tokens(1, 100))
    assert len(clients[0].sent) == 1
    await pool.close()


@in_a_loop
async def test_work_of_a_server_that_stopped_to_capture_is_given_back_and_it_gets_no_more():
    clients, said = [Client(name) for name in "ab"], []
    pool = pool_of(clients, said.append)
    tasks = await send(pool, [tokens(n, 100) for n in range(6)])
    pool.note_stops({"dp0": DiskFullError("no space")})
    await settle()
    assert [task.done() for task in tasks] == [True, False] * 3
    for task in tasks[::2]:
        with pytest.raises(MovedError, match="no space"):
            await task
    tasks = tasks[1::2] + await send(pool, [tokens(n, 100) for n in range(6, 10)])
    assert (len(clients[0].sent), len(clients[1].sent)) == (3, 7)
    clients[1].gate.set()
    assert await asyncio.gather(*tasks) == ["b"] * 7
    assert said == ["a: no space. Its work goes to the other servers."]
    assert pool.size == 1
    pool.note_stops({"dp0": DiskFullError("no space")})
    assert len(said) == 1, "it is said once"
    await pool.close()


@in_a_loop
async def test_a_server_that_captures_anew_is_taken_in_again_once_it_is_up(monkeypatch):
    monkeypatch.setattr(pool_module, "SETTLE_S", 0.0)
    monkeypatch.setattr(pool_module, "RETRY_PAUSE_S", 0.01)
    clients, said = [Client(name) for name in "ab"], []
    pool = pool_of(clients, said.append)
    clients[0].gate.set()
    clients[1].gate.set()
    pool.note_stops({"dp1": StoreError("broken")})
    clients[1].up = False
    pool.note_stops({})
    assert await serve(pool, tokens(1, 9)) == "a"
    assert not pool.servers[1].usable
    clients[1].up = True
    while not pool.servers[1].usable:
        await asyncio.sleep(0.01)
    assert said[1:] == ["b is back."]
    await pool.close()


@in_a_loop
async def test_a_server_that_was_lost_and_captures_no_more_is_told_to_be_back_once_it_is(monkeypatch):
    monkeypatch.setattr(pool_module, "RETRY_PAUSE_S", 0.01)
    clients, said = [Client(name) for name in "ab"], []
    pool = pool_of(clients, said.append)
    clients[1].up = False
    for _ in range(2):
        with pytest.raises(ConnectionError):
            await pool.serve([1], lambda client: client.prefill([1]), {pool.servers[0]})
        pool.note_stops({"dp1": StoreError("full")})
        pool.note_stops({})
        pool.servers[1].up = True
    pool.note_stops({"dp1": StoreError("full")})
    clients[1].up = True
    await asyncio.sleep(0.05)
    assert "b is back." not in said
    pool.note_stops({})
    await asyncio.sleep(0.05)
    assert pool.servers[1].usable
    assert said.count("b is back.") == 1
    await pool.close()


@in_a_loop
async def test_when_no_server_is_left_that_captures_its_reason_ends_the_run():
    pool = pool_of([Client(name) for name in "ab"])
    pool.note_stops({"dp1": StoreError("broken")})
    with pytest.raises(DiskFullError, match="no space"):
        pool.note_stops({"dp1": StoreError("broken"), "dp0": DiskFullError("no space")})
    assert not await pool.wait_healthy(0)


@in_a_loop
async def test_a_stop_is_the_one_unknown_servers_or_ends_the_run():
    pool = pool_of([Client(name) for name in "abc"])
    pool.servers[2].replicas = None
    pool.note_stops({"dp7": StoreError("broken")})
    assert [server.usable for server in pool.servers] == [True, True, False]
    pool.servers[1].replicas = None
    with pytest.raises(StoreError, match="broken"):
        pool.note_stops({"dp8": StoreError("broken")})


@in_a_loop
async def test_a_stop_of_a_server_that_is_not_the_runs_is_nothing_to_it():
    pool = pool_of([Client("a")])
    pool.note_stops({"dp7": StoreError("broken")})
    assert pool.servers[0].usable


@in_a_loop
async def test_a_slow_server_gives_half_of_its_work_to_one_that_has_none(monkeypatch):
    monkeypatch.setattr(pool_module, "SLOW_S", 0.0)
    clients = [Client(name) for name in "ab"]
    pool = pool_of(clients)
    prefix = tokens(0, 64)
    tasks = await send(pool, [prefix + tokens(n, 100) for n in range(1, 9)])
    assert (len(clients[0].sent), len(clients[1].sent)) == (8, 0), "a shared prefix keeps them together"
    pool.rebalance()
    await settle()
    assert not any(task.done() for task in tasks), "it may get work any moment"
    pool.rebalance()
    await settle()
    assert [task.done() for task in tasks] == [False] * 4 + [True] * 4, "those sent last are given back"
    for task in tasks[4:]:
        with pytest.raises(MovedError, match="a is slower"):
            await task
    again = await send(pool, [prefix + tokens(n, 100) for n in range(5, 9)])
    assert len(clients[1].sent) == 4, "they do not go back to where they came from"
    for client in clients:
        client.gate.set()
    assert await asyncio.gather(*again) == ["b"] * 4


@in_a_loop
async def test_what_is_answered_soon_stays_where_it_is():
    clients = [Client(name) for name in "ab"]
    pool = pool_of(clients)
    prefix = tokens(0, 64)
    tasks = await send(pool, [prefix + tokens(n, 100) for n in range(1, 9)])
    for _ in range(4):
        pool.rebalance()
        await settle()
    assert not any(task.done() for task in tasks)
    clients[0].gate.set()
    assert await asyncio.gather(*tasks) == ["a"] * 8


@in_a_loop
async def test_the_last_prompt_of_a_server_stays_where_it_is(monkeypatch):
    monkeypatch.setattr(pool_module, "SLOW_S", 0.0)
    clients = [Client(name) for name in "ab"]
    pool = pool_of(clients)
    (task,) = await send(pool, [tokens(1, 10)])
    for _ in range(4):
        pool.rebalance()
        await settle()
    assert not task.done()
    clients[0].gate.set()
    assert await task == "a"


@in_a_loop
async def test_the_last_prompt_of_a_server_that_is_not_there_any_more_goes_to_another(monkeypatch):
    """A machine without power closes no connection: only a question shows it."""
    monkeypatch.setattr("sglang_hs_capture.driver.pool.SETTLE_S", 0.0)
    monkeypatch.setattr("sglang_hs_capture.driver.pool.RETRY_PAUSE_S", 0.01)
    said: list[str] = []
    clients = [Client("a"), Client("b")]
    pool = pool_of(clients, said.append)
    (task,) = await send(pool, [tokens(0, 10)])
    pool.rebalance()
    pool.rebalance()
    await settle()
    assert not task.done(), "nothing is asked so early"
    monkeypatch.setattr("sglang_hs_capture.driver.pool.SILENT_S", 0.0)
    pool.rebalance()
    await settle()
    assert not task.done(), "the server says that it lives"
    clients[0].up = False
    pool.rebalance()
    await asyncio.sleep(0.1)
    with pytest.raises(MovedError, match="a was lost"):
        await task
    assert "Lost a (a prompt is there for 0 s, and nothing answers)" in said[0]
    await pool.close()


@in_a_loop
async def test_a_connection_that_breaks_is_no_loss_of_a_server_that_is_well():
    """SGLang closes connections that were idle, and may do so just when a prompt is sent."""
    said: list[str] = []
    clients = [Client("a"), Client("b")]
    pool = pool_of(clients, said.append)

    async def broken(client: Client) -> str:
        raise ConnectionError(f"{client.url}: can not write")

    outcomes = await asyncio.gather(
        *(pool.serve(tokens(n, 10), broken, set()) for n in range(20)), return_exceptions=True
    )
    assert {type(outcome) for outcome in outcomes} == {ConnectionError}
    assert said == []
    assert all(server.usable for server in pool.servers)
    clients[0].up = False
    with pytest.raises(ConnectionError):
        await pool.serve(tokens(0, 10), broken, {pool.servers[1]})
    assert not pool.servers[0].usable
    assert said == ["Lost a (a: can not write). Its work goes to the other servers."]
    await pool.close()


@in_a_loop
async def test_a_server_whose_capture_was_ended_gives_its_work_back_until_it_begins_anew(monkeypatch):
    monkeypatch.setattr("sglang_hs_capture.driver.pool.RETRY_PAUSE_S", 0.01)
    said: list[str] = []
    clients = [Client("a"), Client("b")]
    pool = pool_of(clients, said.append)
    (task,) = await send(pool, [tokens(0, 10)])
    pool.note_ends({"dp0"})
    with pytest.raises(MovedError, match="a was told to stop"):
        await task
    await asyncio.sleep(0.05)
    pool.note_ends({"dp0"})
    assert said == ["Lost a (it was told to stop). Its work goes to the other servers."]
    assert not pool.servers[0].usable, "it is not back as long as its capture is over, whatever its HTTP server says"
    pool.note_ends({"dp0", "dp1"})
    assert said[1:] == ["Lost b (it was told to stop). No other can be used; it is waited for."]
    with pytest.raises(pool_module.NoServerError, match="told to stop"):
        await serve(pool, tokens(1, 10))
    pool.note_ends({"dp1"})
    await asyncio.sleep(0.05)
    assert said[2:] == ["a is back."]
    await assert_it_answers(pool, clients[0])
    await pool.close()


@in_a_loop
async def test_the_end_of_a_capture_that_is_nobodys_is_the_one_servers_that_does_not_tell_its_name():
    pool = ServerPool([Server(Client("a"))])
    pool.note_ends({"dp0"})
    assert not pool.usable
    pool = ServerPool([Server(Client("a")), Server(Client("b"))])
    pool.note_ends({"dp0"})
    assert all(server.usable for server in pool.servers), "it may be of either"


@in_a_loop
async def test_a_server_that_shuts_down_gets_no_more_and_gives_back_what_it_has(monkeypatch):
    """It would take all that comes, and not end before it has nothing to do."""
    for name, seconds in {"SETTLE_S": 0.0, "RETRY_PAUSE_S": 0.01, "LEAVING_S": 0.0}.items():
        monkeypatch.setattr(pool_module, name, seconds)
    clients = [Client("a"), Client("b")]
    pool = pool_of(clients)
    (task,) = await send(pool, [tokens(0, 10)])
    pool.look_for_leaving()
    await settle()
    assert pool.servers[0].usable
    clients[0].leaving, clients[0].up = True, False
    pool.look_for_leaving()
    with pytest.raises(MovedError, match="a was lost"):
        await task
    (task,) = await send(pool, [tokens(0, 10)])
    clients[1].leaving, clients[1].up = True, False
    pool.look_for_leaving()
    with pytest.raises(MovedError, match="b was lost"):
        await task
    with pytest.raises(pool_module.NoServerError, match="told to stop"):
        await serve(pool, tokens(1, 10))
    clients[0].leaving, clients[0].up = False, True
    await asyncio.sleep(0.05)
    await assert_it_answers(pool, clients[0])
    await pool.close()


@in_a_loop
async def test_a_prompt_that_failed_goes_to_a_server_that_has_not_had_it():
    clients = [Client("a"), Client("b"), Client("c")]
    for client in clients:
        client.gate.set()
    pool, tried, prompt = pool_of(clients), set(), tokens(0, 200)
    names = [await pool.serve(prompt, lambda client: client.prefill(prompt), tried) for _ in range(4)]
    assert sorted(names[:3]) == ["a", "b", "c"]
    assert names[3] in names[:3], "there is no other"


@in_a_loop
async def test_what_a_lost_server_answered_and_did_not_acknowledge_is_given_back(monkeypatch):
    monkeypatch.setattr(pool_module, "SETTLE_S", 0.05)
    monkeypatch.setattr(pool_module, "RETRY_PAUSE_S", 0.01)
    clients, said = [Client(name) for name in "ab"], []
    pool = pool_of(clients, said.append)
    (waiting,) = await send(pool, [tokens(1, 10)])
    clients[0].up = False
    pool.servers[1].stopped = StoreError("x")
    with pytest.raises(ConnectionError):
        await serve(pool, tokens(2, 10))
    with pytest.raises(MovedError, match="a was lost"):
        await asyncio.wait_for(waiting, 10)
    assert "Lost a (a is gone)" in said[0]
    await pool.close()


@in_a_loop
async def test_servers_are_added_and_removed_while_it_goes_on():
    clients = [Client(name) for name in "ab"]
    pool = ServerPool([])
    assert not await pool.wait_healthy(0)
    with pytest.raises(ConnectionError, match="no server is left"):
        await serve(pool, [1])
    servers = [Server(client) for client in clients]
    pool.add(servers[0])
    assert await pool.wait_healthy(0)
    (task,) = await send(pool, [[1, 2]])
    pool.add(servers[1])
    assert pool.size == 2
    await pool.remove(servers[0], "a goes")
    with pytest.raises(MovedError, match="a goes"):
        await task
    clients[1].gate.set()
    assert await serve(pool, [1, 2]) == "b"
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
async def test_servers_that_do_not_tell_their_names_are_counted(tmp_path):
    class Silent(FakeServer):
        async def _info(self, _: Any) -> Any:
            return web.Response(text="<html>")

    async with Silent(tmp_path) as first, Silent(tmp_path, writer="dp1-pp0") as second:
        assert len((await opened([first, second], tmp_path))[0]) == 2
        second.record.state = "closed"
        write_session(tmp_path, second.record)
        with pytest.raises(EngineError, match=r"expected 2 servers .* found dp0; .* cannot all be among them"):
            await opened([first, second], tmp_path)


@in_a_loop
async def test_servers_under_one_name_are_refused(tmp_path):
    """The second server's capture was refused by the dataset's lock, though it serves."""
    async with FakeServer(tmp_path) as first, FakeServer(tmp_path / "other") as second:
        second.directory = tmp_path
        with pytest.raises(EngineError, match=rf"{first.url} and {second.url} both capture as dp0: name a server once"):
            await opened([first, second], tmp_path)


@in_a_loop
async def test_one_server_under_two_addresses_is_refused(tmp_path):
    async with FakeServer(tmp_path) as first, FakeServer(tmp_path, writer="dp1-pp0"):
        urls = [first.url, first.url.replace("127.0.0.1", "localhost")]
        target = RunningServers(urls, tmp_path, expected=lambda info: [], api_key=None, grace_s=2.0)
        with pytest.raises(EngineError, match="both capture as dp0"):
            await target.open(Lines().say)
        await target.close()


@in_a_loop
async def test_a_server_that_captures_nothing_is_not_taken_for_one_of_anothers_ranks(tmp_path):
    """The first one has two data-parallel ranks, so that there are as many replicas as URLs."""

    class Plain(FakeServer):
        async def _info(self, _: Any) -> Any:
            return web.json_response({})

    async with FakeServer(tmp_path) as first, FakeServer(tmp_path, writer="dp1-pp0"), Plain(tmp_path / "x") as plain:
        first.ranks = 2
        with pytest.raises(EngineError, match=f"expected 2 servers .* found dp0, dp1; {plain.url} cannot all be among"):
            await opened([first, plain], tmp_path)


@in_a_loop
async def test_a_server_whose_process_is_not_there_is_told(tmp_path):
    async with FakeServer(tmp_path) as first, FakeServer(tmp_path / "other", writer="dp3-pp0") as second:
        second.directory = tmp_path
        with pytest.raises(EngineError, match=f"{second.url} should capture as dp3 .* only dp0 are there"):
            await opened([first, second], tmp_path)


@in_a_loop
async def test_a_server_of_whose_ranks_one_is_not_there_is_told(tmp_path):
    async with FakeServer(tmp_path) as first, FakeServer(tmp_path, writer="dp1-pp0") as second:
        first.ranks = 2
        assert len((await opened([first], tmp_path))[0]) == 2
        second.record.state = "refused"
        write_session(tmp_path, second.record)
        with pytest.raises(EngineError, match=f"{first.url} should capture as dp0, dp1 .* only dp0 are there"):
            await opened([first], tmp_path)


@in_a_loop
async def test_what_other_servers_left_says_nothing_of_this_runs(tmp_path):
    """A stage that was killed on another machine stays "ready"; nobody knows whether it is there."""
    async with FakeServer(tmp_path, writer="dp1-pp0") as server:
        dead = replace(server.record, writer="dp0-pp1", host="elsewhere", columns=["boundary:1"], rid_prefix="x")
        write_session(tmp_path, dead)
        sessions, _ = await opened([server], tmp_path)
        assert [record.writer for record in sessions] == ["dp1-pp0"]
        server.info = {}
        with pytest.raises(EngineError, match="no process of dp0 captures final:pre_norm"):
            await opened([server], tmp_path)


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
            await has_had(first, 5)
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


@pytest.fixture
def _quick(monkeypatch):
    monkeypatch.setattr(delivery, "RESEND_PAUSE_S", 0.01)
    monkeypatch.setattr(pool_module, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(pump, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(pump, "SESSION_INTERVAL_S", 0.02)


async def has_had(server: FakeServer, requests: int) -> None:
    """Wait until a server has been sent so many requests."""
    while len(server.requests) < requests:
        await asyncio.sleep(0.001)


def run_on_two(
    directory: Path,
    during: Callable[[FakeServer, FakeServer], Any],
    behave: Callable[[int, str], str] = lambda number, rid: "ok",
    samples: int = 60,
    attempts: int = 1,
) -> tuple[Summary, FakeServer, FakeServer, Lines]:
    """A whole run on two servers, the first of which behaves like ``behave``; ``during`` runs beside it."""
    lines = Lines()

    async def main() -> tuple[Summary, FakeServer, FakeServer]:
        async with FakeServer(directory, behave) as first, FakeServer(directory, writer="dp1-pp0") as second:
            urls = [first.url, second.url]
            target = RunningServers(urls, directory, expected=lambda info: [], api_key=None, grace_s=2.0)
            settings = RunSettings(
                directory,
                delivery=DeliverySettings(attempts=attempts, ack_timeout_s=60.0, grace_s=5.0),
                pump=PumpSettings(max_prompts=4),
            )
            wanted = [make_sample(f"s{number}", line=number + 1) for number in range(samples)]
            beside = asyncio.ensure_future(during(first, second))
            summary = await asyncio.wait_for(CaptureRun(target, wanted, settings, lines).run(), 40)
            beside.cancel()
            return summary, first, second

    return (*asyncio.run(main()), lines)


@pytest.mark.usefixtures("_quick")
def test_a_server_that_fails_at_once_makes_no_sample_fail(tmp_path):
    """It always has the least to do, and would get each of its failures again."""

    async def during(_first: FakeServer, _second: FakeServer) -> None:
        return

    summary, first, second, _ = run_on_two(tmp_path, during, behave=lambda number, rid: "error", attempts=2)
    assert (summary.captured, summary.dropped, summary.exit_code) == (60, [], 0)
    assert len(first.requests) <= 60
    assert len(second.requests) == 60


@pytest.mark.usefixtures("_quick")
def test_a_run_goes_on_when_capture_stops_on_one_of_its_servers(tmp_path):
    async def during(first: FakeServer, second: FakeServer) -> None:
        await has_had(first, 5)
        first.stop_capture("no space: less than 2.0 GB free", "DiskFullError")

    summary, first, second, lines = run_on_two(tmp_path, during, lambda number, rid: "ok" if number < 3 else "silent")
    assert (summary.captured, summary.dropped, summary.exit_code) == (60, [], 0), summary.ended
    assert sorted(sample.id for sample in load_index(tmp_path).samples) == sorted(f"s{n}" for n in range(60))
    (said,) = [line for line in lines.said if "less than 2.0 GB free" in line]
    assert said.startswith(f"{first.url}: capture has stopped")
    assert said.endswith("Its work goes to the other servers.")
    assert len(second.requests) == 57


@pytest.mark.usefixtures("_quick")
def test_servers_that_are_told_to_stop_hold_no_run_up(tmp_path):
    """What they were sent last is never answered, and their connections stay; one of them is started again."""

    async def during(first: FakeServer, second: FakeServer) -> None:
        second.behave = lambda number, rid: "slow"
        await has_had(first, 5)
        for server in (first, second):
            server.behave = lambda number, rid: "silent"
            server.record.state = "closed"
            write_session(server.directory, server.record)
        await asyncio.sleep(0.3)
        first.behave = lambda number, rid: "ok"
        first.start_anew()

    summary, first, second, lines = run_on_two(tmp_path, during, lambda number, rid: "slow")
    assert (summary.captured, summary.dropped, summary.exit_code) == (60, [], 0), summary.ended
    assert sorted(sample.id for sample in load_index(tmp_path).samples) == sorted(f"s{n}" for n in range(60))
    assert any(line.startswith(f"Lost {second.url} (it was told to stop).") for line in lines.said)
    assert f"{first.url} is back." in lines.said


@pytest.mark.usefixtures("_quick")
def test_a_server_whose_capture_stopped_is_used_again_when_it_was_started_anew(tmp_path):
    async def during(first: FakeServer, second: FakeServer) -> None:
        second.behave = lambda number, rid: "slow"
        await has_had(first, 5)
        first.stop_capture("broken")
        await has_had(second, 20)
        first.behave, first.requests = (lambda number, rid: "ok"), []
        first.start_anew()

    summary, first, _, lines = run_on_two(tmp_path, during, lambda number, rid: "ok" if number < 3 else "silent")
    assert (summary.captured, summary.dropped, summary.exit_code) == (60, [], 0), summary.ended
    assert sorted(sample.id for sample in load_index(tmp_path).samples) == sorted(f"s{n}" for n in range(60))
    assert len(first.requests) > 0
    assert f"{first.url} is back." in lines.said


def settings_of(**capture: object) -> dict[str, Any]:
    return {"json_model_override_args": json.dumps({"hs_capture": capture}), "dp_size": 1}


ELSEWHERE = [
    (
        lambda d: settings_of(output_dir=str(d), replica=7),
        "it captured as dp0 before and now as dp7; start it as it was",
    ),
    (lambda d: settings_of(output_dir=str(d / "x")), "captures into .*x, not into --output"),
    (lambda d: {"dp_size": 1}, "it captured as dp0 before and now does not say that it captures"),
]


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(("info", "reason"), ELSEWHERE)
def test_a_server_that_is_another_when_it_comes_back_gets_no_work(tmp_path, info, reason):
    async def during(first: FakeServer, second: FakeServer) -> None:
        second.behave = lambda number, rid: "slow"
        await has_had(first, 5)
        first.info, first.behave = info(tmp_path), lambda number, rid: "cut"
        await asyncio.sleep(0.3)
        first.requests.clear()

    summary, first, _, lines = run_on_two(tmp_path, during, attempts=20)
    assert (summary.captured, summary.dropped, summary.exit_code) == (60, [], 0), summary.ended
    assert first.requests == []
    (said,) = [line for line in lines.said if "gets no work" in line]
    assert re.search(reason, said)


@pytest.mark.usefixtures("_quick")
def test_it_gets_work_again_once_it_is_what_it_was(tmp_path):
    async def during(first: FakeServer, second: FakeServer) -> None:
        second.behave = lambda number, rid: "slow"
        await has_had(first, 5)
        first.info, first.behave = {}, lambda number, rid: "cut"
        await asyncio.sleep(0.3)
        first.requests.clear()
        first.info, first.behave = None, lambda number, rid: "ok"

    summary, first, _, lines = run_on_two(tmp_path, during, attempts=20)
    assert (summary.captured, summary.dropped, summary.exit_code) == (60, [], 0), summary.ended
    assert first.requests
    assert [line.partition(" ")[2] for line in lines.said if line.startswith(first.url)] == [
        "is up again and gets no work: it captured as dp0 before and now does not say that it captures; "
        "start it as it was started at first.",
        "is back.",
    ]


@pytest.mark.usefixtures("_quick")
def test_the_only_server_that_comes_back_as_another_ends_the_run_with_the_reason(tmp_path):
    lines = Lines()

    async def main() -> tuple[Summary, FakeServer]:
        async with FakeServer(tmp_path, lambda number, rid: "cut" if number > 2 else "ok") as server:

            async def during() -> None:
                await has_had(server, 4)
                server.info, server.requests = settings_of(output_dir=str(tmp_path / "other")), []

            target = RunningServers([server.url], tmp_path, expected=lambda info: [], api_key=None, grace_s=2.0)
            settings = RunSettings(tmp_path, delivery=DeliverySettings(grace_s=0.5), pump=PumpSettings(max_prompts=1))
            wanted = [make_sample(f"s{number}", line=number + 1) for number in range(9)]
            beside = asyncio.ensure_future(during())
            summary = await asyncio.wait_for(CaptureRun(target, wanted, settings, lines).run(), 40)
            await beside
            return summary, server

    summary, server = asyncio.run(main())
    assert (summary.captured, summary.exit_code) == (3, EngineError.exit_code)
    assert re.search(
        r"did not come back within 0.5 s; .* is up again, but the server at .*other, not into", summary.ended
    )
    assert len(server.requests) <= 1


@pytest.mark.usefixtures("_quick")
def test_when_capture_stops_on_all_servers_the_run_ends_with_the_reason(tmp_path):
    async def during(first: FakeServer, second: FakeServer) -> None:
        second.behave = lambda number, rid: "silent"
        while not (first.requests and second.requests):
            await asyncio.sleep(0.001)
        first.stop_capture("a is full", "DiskFullError")
        await asyncio.sleep(0.1)
        second.stop_capture("b is full", "DiskFullError")

    summary, *_ = run_on_two(tmp_path, during, lambda number, rid: "silent")
    assert (summary.captured, summary.exit_code) == (0, 4)
    assert "is full" in summary.ended


@pytest.mark.usefixtures("_quick")
def test_what_a_slow_server_has_at_the_end_is_done_by_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "SLOW_S", 0.05)

    async def during(first: FakeServer, second: FakeServer) -> None:
        await asyncio.sleep(3600)

    summary, _, second, _ = run_on_two(
        tmp_path, during, lambda number, rid: "ok" if number == 0 else "slow", samples=20
    )
    assert (summary.captured, summary.dropped, summary.exit_code) == (20, [], 0), summary.ended
    assert summary.resent >= 2
    assert len(second.requests) > 15
