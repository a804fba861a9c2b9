"""A Ray cluster in this process: as much of Ray as the driver uses, and hosts whose engines are fake servers."""

import asyncio
import sys
import types
from collections.abc import Callable
from typing import Any

from sglang_hs_capture.driver import ray_cluster
from sglang_hs_capture.driver.ray_host import EngineRequest
from sglang_hs_capture.errors import HsCaptureError
from tests.unit.fake_server import FakeServer


class ActorDiedError(Exception):
    """Stands for Ray's own."""


class Host:
    """Plays ``EngineHost``: its engine is a ``FakeServer`` in the running loop."""

    def __init__(self, cluster: "FakeCluster", request: EngineRequest) -> None:
        self.cluster, self.request = cluster, request
        self.server: FakeServer | None = None
        self.ended: HsCaptureError | None = None

    async def ports(self) -> tuple[str, int, int]:
        return "10.0.0.1", 1, 2

    async def start(self, capture: dict[str, Any], host: str, port: int, dist: str, rank: int) -> None:
        self.cluster.started.append((capture["replica"], host, port, dist, rank))
        if self.cluster.refuse is not None:
            raise self.cluster.refuse
        if rank == 0:
            server = FakeServer(self.request.directory, self.cluster.behave, writer=f"dp{capture['replica']}-pp0")
            server.record.run_id = capture["run_id"]
            self.server = await server.__aenter__()
            self.cluster.servers[capture["replica"]] = self.server

    async def wait_ready(self) -> tuple[str, None]:
        assert self.server is not None
        return self.server.url, None

    async def check(self) -> HsCaptureError | None:
        return self.ended

    async def stop(self) -> None:
        await self.end()

    async def end(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            await server.__aexit__()


class Handle:
    """An actor."""

    def __init__(self, host: Host) -> None:
        self.host, self.dead = host, False

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            if self.dead:
                raise ActorDiedError("The actor died unexpectedly.")
            return await getattr(self.host, name)(*args)

        return types.SimpleNamespace(remote=lambda *args: asyncio.ensure_future(call(*args)))


class Group:
    """A placement group; ready when the cluster has room for it."""

    def __init__(self, cluster: "FakeCluster", bundles: list[dict[str, float]], strategy: str) -> None:
        self.cluster, self.bundles, self.strategy = cluster, bundles, strategy

    async def _ready(self) -> None:
        while len(self.cluster.placed) >= self.cluster.room:
            await asyncio.sleep(0.01)
        self.cluster.placed.append(self)

    def ready(self) -> Any:
        return asyncio.ensure_future(self._ready())


class FakeCluster:
    """The cluster, with room for ``room`` placement groups; ``refuse`` is what starts of engines raise.

    Attributes:
        started: replica, host, port, meeting point and rank of each start.
        servers: the engines' servers, by replica.
        actors: all that were ever made; those of one engine follow each other.
        options: what each was made with.
    """

    def __init__(self, room: int, behave: Callable[[int, str], str] = lambda number, rid: "ok") -> None:
        self.room, self.behave = room, behave
        self.refuse: Exception | None = None
        self.placed: list[Group] = []
        self.asked: list[Group] = []
        self.started: list[tuple[int, str, int, str, int]] = []
        self.servers: dict[int, FakeServer] = {}
        self.actors: list[Handle] = []
        self.options: list[dict[str, Any]] = []
        self._ends: set[asyncio.Task[None]] = set()

    def install(self, monkeypatch: Any) -> None:
        """Put it in the place of Ray."""
        ray, util = types.ModuleType("ray"), types.ModuleType("ray.util")
        groups, strategies = types.ModuleType("groups"), types.ModuleType("strategies")
        vars(ray).update(util=util, remote=lambda cls: types.SimpleNamespace(options=self._options), kill=self._kill)
        vars(groups).update(placement_group=self._group, remove_placement_group=self._remove)
        vars(strategies).update(PlacementGroupSchedulingStrategy=lambda group, **index: (group, index))
        names = {"ray": ray, "ray.util": util, "ray.util.placement_group": groups}
        for name, module in (names | {"ray.util.scheduling_strategies": strategies}).items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(ray_cluster, "POLL_S", 0.02)

    def lose(self, number: int) -> None:
        """The actor that was made as number so and so dies, and its engine with it."""
        handle = self.actors[number]
        handle.dead = True
        self._end(handle.host)

    def _options(self, **options: Any) -> Any:
        self.options.append(options)

        def remote(request: EngineRequest) -> Handle:
            self.actors.append(Handle(Host(self, request)))
            return self.actors[-1]

        return types.SimpleNamespace(remote=remote)

    def _group(self, bundles: list[dict[str, float]], strategy: str) -> Group:
        self.asked.append(Group(self, bundles, strategy))
        return self.asked[-1]

    def _remove(self, group: Group) -> None:
        self.asked.remove(group)
        if group in self.placed:
            self.placed.remove(group)

    def _kill(self, handle: Handle) -> None:
        handle.dead = True
        self._end(handle.host)

    def _end(self, host: Host) -> None:
        task = asyncio.ensure_future(host.end())
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)
