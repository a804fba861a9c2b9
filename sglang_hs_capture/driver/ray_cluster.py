"""Engines on a Ray cluster: one in each placement group, started and replaced as resources come and go.

Ray starts and finds processes, and that is all: an actor on each node of an engine keeps SGLang as its child, and says
where it answers. Prompts go to these servers as to any others, over HTTP, and what they acknowledge is read in the
dataset. Ray is imported when it is used, since it is an optional dependency.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sglang_hs_capture.driver.client import ServerClient
from sglang_hs_capture.driver.launch import flag_value
from sglang_hs_capture.driver.pool import Say, Server, ServerPool
from sglang_hs_capture.driver.ray_host import EngineHost, EngineRequest
from sglang_hs_capture.driver.target import Target
from sglang_hs_capture.errors import ConfigError, DatasetLockedError, EngineError, HsCaptureError
from sglang_hs_capture.store import fs
from sglang_hs_capture.store.identity import DATASET_FILE
from sglang_hs_capture.store.recovery import recover_dataset
from sglang_hs_capture.store.session import SessionRecord, read_sessions, replica_names, write_session

POLL_S = 1.0
STOP_S = 60.0
# So many starts in a row that failed, and no more are tried while others work.
START_FAILURES = 3
TP_FLAGS = ("--tp-size", "--tp", "--tensor-parallel-size")
PP_FLAGS = ("--pp-size", "--pp", "--pipeline-parallel-size")
ATTENTION_DP_FLAGS = ("--attn-dp-size",)
DP_FLAGS = ("--dp-size", "--dp", "--data-parallel-size")


@dataclass(frozen=True)
class RayPlan:
    """How many engines there are to be, and what each takes.

    Attributes:
        address: the cluster's, ``auto`` for the one that this machine belongs to.
        engines: how many engines; None for as many as there is room for.
        resources: what Ray sets aside on each node of an engine.
        replicas: data-parallel replicas of one engine.
    """

    address: str
    engines: int | None
    resources: Mapping[str, float]
    replicas: int = 1


def default_resources(sglang_args: Sequence[str], *, cpu: bool, nodes: int) -> dict[str, float]:
    """What an engine takes on each node: a GPU, or on the CPU platform a CPU, for each of its ranks there.

    Raises:
        ConfigError: its ranks do not spread evenly over the nodes.
    """
    sizes = [_size(sglang_args, names) for names in (TP_FLAGS, PP_FLAGS)]
    # With DP attention the replicas are parts of the tensor-parallel group.
    if "--enable-dp-attention" not in sglang_args:
        sizes.append(_size(sglang_args, DP_FLAGS))
    ranks = sizes[0] * sizes[1] * (sizes[2] if len(sizes) > 2 else 1)
    if ranks % nodes:
        raise ConfigError(f"--ray-nodes {nodes}: an engine of {ranks} ranks does not spread evenly over so many nodes")
    return {"CPU" if cpu else "GPU": ranks / nodes}


def replicas_of(sglang_args: Sequence[str]) -> int:
    """The data-parallel replicas, or ranks of DP attention, of an engine with these flags."""
    return max(_size(sglang_args, DP_FLAGS), _size(sglang_args, ATTENTION_DP_FLAGS))


def _size(args: Sequence[str], names: tuple[str, ...]) -> int:
    text = flag_value(args, *names) or "1"
    if not text.isdigit() or not int(text):
        raise ConfigError(f"{names[0]} after '--': expected a number; got {text!r}")
    return int(text)


def connect(address: str) -> None:
    """Join a Ray cluster. To be called before signals are handled, since Ray handles them, too.

    Raises:
        ConfigError: Ray is not installed.
        EngineError: there is no such cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"--ray: Ray is not installed ({error}): pip install 'sglang-hs-capture[ray]'") from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise EngineError(
            f"--ray-address {address}: no Ray cluster can be joined there ({' '.join(str(error).split())}); start one "
            "with `ray start --head`"
        ) from None


@dataclass(eq=False)
class _Engine:
    """One engine: its number among those of this run, and what Ray has given for it so far."""

    slot: int
    group: Any
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    hosts: list[Any] = field(default_factory=list)
    placed: bool = False
    server: Server | None = None


class RayEngines(Target):
    """The engines of one run on a Ray cluster that this process has joined."""

    def __init__(self, plan: RayPlan, request: EngineRequest) -> None:
        """Start nothing yet."""
        self._plan, self._request = plan, request
        self._directory = request.directory
        self._engines: dict[asyncio.Task[None], _Engine] = {}
        self._run_ids: set[str] = set()
        self._lost_slots: set[int] = set()
        self._failures = 0
        self._changed, self._up = asyncio.Event(), asyncio.Event()
        self._tending: asyncio.Task[None] | None = None

    async def open(self, say: Say) -> list[SessionRecord]:
        self._say, self.pool = say, ServerPool([], say)
        marker = self._directory / self._request.marker
        with fs.io_errors(marker, "write"):
            marker.touch()
        say(f"Starting engines with {_words(self._plan.resources)} on each of {self._request.nodes} nodes ...")
        self._tending = asyncio.create_task(self._tend())
        up = asyncio.create_task(self._up.wait())
        try:
            await asyncio.wait({self._tending, up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        self.check_alive()
        return [record for record in read_sessions(self._directory) if record.run_id in self._run_ids]

    def check_alive(self) -> None:
        if self._tending is not None and self._tending.done() and not self._tending.cancelled():
            self._tending.result()

    async def close(self) -> None:
        """End all engines in order, and finish the shards of those that were lost."""
        if self._tending is None:
            return
        self._tending.cancel()
        await asyncio.gather(self._tending, return_exceptions=True)
        await self.pool.close()
        stops = [host.stop.remote() for engine in self._engines.values() for host in engine.hosts if engine.server]
        with suppress(Exception):  # those that cannot be ended in order are killed
            await asyncio.wait_for(asyncio.gather(*map(_result, stops), return_exceptions=True), STOP_S)
        for task in list(self._engines):
            task.cancel()
        await asyncio.gather(*self._engines, return_exceptions=True)
        (self._directory / self._request.marker).unlink(missing_ok=True)
        if (self._directory / DATASET_FILE).exists():
            self._put_in_order()

    def kill(self) -> None:
        for engine in self._engines.values():
            _give_back(engine)

    def _put_in_order(self) -> None:
        try:
            recover_dataset(self._directory)
        except DatasetLockedError as error:
            self._say(f"An engine that was lost still writes ({error}); its last shard stays unfinished.")
            return
        for record in read_sessions(self._directory):
            if record.run_id in self._run_ids and record.state == "ready":
                record.state = "closed"
                write_session(self._directory, record)

    async def _tend(self) -> None:
        """Keep as many engines as there are to be, or one more asked for than there was room for."""
        while True:
            while self._wants_more():
                engine = self._ask()
                self._engines[asyncio.create_task(self._live(engine))] = engine
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait())
            await asyncio.wait({changed, *self._engines}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            for task in [task for task in self._engines if task.done()]:
                self._ended(self._engines.pop(task), task.exception())

    def _wants_more(self) -> bool:
        if self._failures >= START_FAILURES:
            return False
        if self._plan.engines is not None:
            return len(self._engines) < self._plan.engines
        return all(engine.placed for engine in self._engines.values())

    def _ask(self) -> _Engine:
        from ray.util.placement_group import placement_group

        used = {engine.slot for engine in self._engines.values()} | self._lost_slots
        slot = next(number for number in range(len(used) + 1) if number not in used)
        bundles = [dict(self._plan.resources) for _ in range(self._request.nodes)]
        return _Engine(slot, placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK"))

    async def _live(self, engine: _Engine) -> None:
        """An engine's life, from the wait for its resources to its end, which is always an exception."""
        try:
            await _result(engine.group.ready())
            engine.placed = True
            self._changed.set()
            await self._start(engine)
            while True:
                await asyncio.sleep(POLL_S)
                for found in await asyncio.gather(*(_result(host.check.remote()) for host in engine.hosts)):
                    if found is not None:
                        raise found
        finally:
            if engine.server is not None and engine.server in self.pool.servers:
                await self.pool.remove(engine.server, f"{engine.server.client.url} was lost")
            _give_back(engine)

    async def _start(self, engine: _Engine) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(self._plan.resources)
        cpus, gpus = resources.pop("CPU", 0), resources.pop("GPU", 0)
        actor = ray.remote(_host_class())
        for bundle in range(self._request.nodes):
            place = PlacementGroupSchedulingStrategy(engine.group, placement_group_bundle_index=bundle)
            options = {"num_cpus": cpus, "num_gpus": gpus, "resources": resources, "scheduling_strategy": place}
            engine.hosts.append(actor.options(**options).remote(self._request))
        (host, port, meeting), *_ = await asyncio.gather(*(_result(each.ports.remote()) for each in engine.hosts))
        replica = self._request.capture.replica + engine.slot * self._plan.replicas
        capture = {**self._request.capture.to_mapping(), "replica": replica, "run_id": engine.run_id}
        starts = [
            each.start.remote(capture, host, port, f"{host}:{meeting}", rank) for rank, each in enumerate(engine.hosts)
        ]
        await asyncio.gather(*map(_result, starts))
        url, api_key = await _first_result(engine.hosts)
        self._run_ids.add(engine.run_id)
        engine.server = Server(ServerClient(url, api_key=api_key), replica_names(replica, self._plan.replicas))
        self.pool.add(engine.server)
        self._failures = 0
        self._say(f"An engine on {host} is up at {url} and captures as dp{replica}.")
        self._up.set()

    def _ended(self, engine: _Engine, error: BaseException | None) -> None:
        """Judge the end of an engine.

        Raises:
            HsCaptureError: none is left, and no other will do better.
        """
        foreseen = error if isinstance(error, HsCaptureError) else None
        # Ray's own messages go on over many lines.
        first_line = next(iter(str(error).strip().splitlines()), "no message")
        reason = f"{type(error).__name__}: {first_line}" if foreseen is None else str(error)
        self._lost_slots.add(engine.slot)
        if engine.server is not None:
            self._say(f"Lost the engine at {engine.server.client.url} ({reason}). Its work goes to others.")
        else:
            self._failures += 1
            self._say(f"An engine did not start: {reason}")
            if self._failures == START_FAILURES:
                self._say(f"{START_FAILURES} engines in a row did not start; no more are tried.")
        if (foreseen and not self._up.is_set()) or (self._failures >= START_FAILURES and not self.pool.servers):
            raise foreseen or EngineError(f"no engine can be started on the Ray cluster: {reason}")


def _host_class() -> type:
    """``EngineHost`` as an actor has it, told where it is by Ray."""

    class Host(EngineHost):
        def __init__(self, request: EngineRequest) -> None:
            import ray

            super().__init__(request, ray.util.get_node_ip_address())

    return Host


async def _result(reference: Any) -> Any:
    """What a call of an actor's returned.

    Raises:
        HsCaptureError: which it raised there.
        Exception: Ray's own, where the actor is gone.
    """
    try:
        return await reference
    except Exception as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, HsCaptureError):
            raise cause from None
        raise


async def _first_result(hosts: Sequence[Any]) -> tuple[str, str | None]:
    """Wait for the first node's word that its engine is ready, or for another node's that it has ended."""
    ready = asyncio.create_task(_result(hosts[0].wait_ready.remote()))
    try:
        while not (await asyncio.wait({ready}, timeout=POLL_S))[0]:
            for found in await asyncio.gather(*(_result(host.check.remote()) for host in hosts[1:])):
                if found is not None:
                    raise found
        url, api_key = ready.result()
        return url, api_key
    finally:
        ready.cancel()


def _give_back(engine: _Engine) -> None:
    """Kill an engine's actors, with whom its processes end, and free its resources."""
    import ray
    from ray.util.placement_group import remove_placement_group

    for host in engine.hosts:
        ray.kill(host)
    remove_placement_group(engine.group)


def _words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
