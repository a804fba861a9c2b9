"""The servers that capture into one dataset: a prompt goes where its prefix is, unless others have less to do."""

import asyncio
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.driver.client import RETRY_PAUSE_S, ServerClient
from sglang_hs_capture.errors import HsCaptureError
from sglang_hs_capture.store.hashing import prefix_hashes

# Prefixes are looked up at multiples of so many tokens; a shorter one is cheaper to compute again than to look for.
BLOCK = 64
# A server with so many tokens more in flight than the least busy one gets no more for the sake of a prefix.
SLACK_TOKENS = 2**16
# Blocks of each server, some 230 bytes each: 30 MB a server, for 8 million tokens, more than its cache holds.
REMEMBERED = 2**17
# What a lost server's writing process had in hand is acknowledged within this time, or not at all.
SETTLE_S = 5.0
# A server that has had its oldest prompt for so long has work for about as long.
SLOW_S = 5.0
# One that has had it for so long, and others nothing to do, may be one that is not there any more: a machine that lost
# its power closes no connection.
SILENT_S = 60.0
# How often a server with work is asked whether it shuts down.
LEAVING_S = 10.0

Say = Callable[[str], None]
Reply = TypeVar("Reply")
Ids = Sequence[int] | NDArray[np.int64]
Check = Callable[["Server"], Awaitable[None]]


class MovedError(Exception):
    """The server that had this prompt is not to answer it any more: another one should; the text says why."""


class NoServerError(ConnectionError):
    """There is no server to send a prompt to at the moment."""


class _Flight:
    """One prompt at one server, from its sending to its acknowledgement."""

    def __init__(self, task: asyncio.Future[Any]) -> None:
        self._task = task
        self.sent_at = time.monotonic()
        self.moved = ""

    def move(self, why: str) -> None:
        """Take it away from its server; the connection is closed, so that the server drops the request."""
        if not self._task.done():
            self.moved = why
            self._task.cancel()


class Server:
    """One server of a pool: what it has in flight, which prefixes it was sent, and whether work may go there.

    Attributes:
        client: talks to it.
        replicas: the names under which its processes write, such as ``dp0``; None where that is not known.
        flights: what it has in flight, in the order sent.
        tokens: tokens in flight.
        up: whether it could be reached when last tried.
        stopped: why it captures no more; None while it does.
        unfit: why it gets nothing although it is up again, since it is not the server that it was; None where it is.
        ended: whether its capture was ended in order, as when the server was told to stop.
        leaving: whether it shuts down; it would take prompts all the same, and not end for as long as they come.
        idle: whether it had nothing to do when the pool last looked.
        asked: whether it is being asked for a sign of life.
        asked_at: when it was last asked whether it shuts down.
        check: the last question whether it is lost, after a connection broke.
        awaited: whether its return is being waited for.
    """

    def __init__(self, client: ServerClient, replicas: frozenset[str] | None = None) -> None:
        self.client, self.replicas = client, replicas
        self.flights: dict[_Flight, None] = {}
        self.tokens = 0
        self.up = True
        self.stopped: HsCaptureError | None = None
        self.unfit: HsCaptureError | None = None
        self.ended = False
        self.leaving = False
        self.idle = False
        self.asked = False
        self.asked_at = time.monotonic()
        self.check: asyncio.Task[bool] | None = None
        self.awaited = False
        self._prefixes: OrderedDict[int, None] = OrderedDict()

    @property
    def usable(self) -> bool:
        """Whether prompts may be sent to it."""
        return self.up and self.captures

    @property
    def captures(self) -> bool:
        """Whether it captures into this dataset, as far as it is known, once it can be reached."""
        return self.stopped is None and self.unfit is None

    @property
    def stops(self) -> bool:
        """Whether it was told to stop, or has."""
        return self.ended or self.leaving

    def known(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's blocks, from its beginning, it has computed or is computing."""
        count = 0
        for value in hashes:
            if value not in self._prefixes:
                break
            count += 1
        return count

    def remember(self, hashes: Sequence[int]) -> None:
        """Note a prompt's blocks as known."""
        for value in hashes:
            self._prefixes[value] = None
            self._prefixes.move_to_end(value)
        while len(self._prefixes) > REMEMBERED:
            self._prefixes.popitem(last=False)

    def let_go(self, flights: Iterable[_Flight], why: str) -> None:
        """Give work back, to be sent to others; what its cache holds is not counted on any more."""
        self._prefixes.clear()
        for flight in list(flights):
            flight.move(why)


class ServerPool:
    """Spreads prompts over servers, which may be lost, stop to capture, come back, be added and be removed meanwhile.

    Work of a server that cannot be used any more, and of a slow one when others have none, is given back to whoever
    asked for it with ``MovedError``, to be sent again.

    Attributes:
        max_prompts: a server with so many in flight gets no more as long as another one has fewer.
    """

    def __init__(
        self, servers: Iterable[Server], say: Say = lambda text: None, check_returned: Check | None = None
    ) -> None:
        """
        Args:
            servers: to begin with.
            say: told in one line when a server is lost or comes back.
            check_returned: asked when a server that was lost is up again; raises ``HsCaptureError`` where it must not
                get work, as after a start with other settings.
        """
        self.servers = list(servers)
        self._check_returned = check_returned
        self.max_prompts = sys.maxsize
        self._say = say
        self._probes: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        """All servers', for messages."""
        return ", ".join(server.client.url for server in self.servers)

    @property
    def size(self) -> int:
        """Servers that prompts may be sent to; at least one, so that a window made for it lets a prompt through."""
        return max(1, sum(server.usable for server in self.servers))

    @property
    def usable(self) -> bool:
        """Whether one of them could be reached when last tried, and captures."""
        return any(server.usable for server in self.servers)

    async def close(self) -> None:
        """Close all connections."""
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        for server in self.servers:
            await server.client.close()

    def add(self, server: Server) -> None:
        """Take in one more server."""
        self.servers.append(server)

    async def remove(self, server: Server, why: str) -> None:
        """Take a server out for good; its work goes to the others."""
        self.servers.remove(server)
        server.let_go(server.flights, why)
        await server.client.close()

    async def serve(self, ids: Ids, work: Callable[[ServerClient], Awaitable[Reply]], tried: set[Server]) -> Reply:
        """Choose a server for a prompt and do ``work`` with it, until the prompt is acknowledged or answered.

        Args:
            ids: the prompt's tokens or, where it has images, its routing ids (``driver/routing.py``).
            work: sends it to the server chosen.
            tried: those that had this prompt before, which get it again only where there is no other; the one chosen is
                added. A server that fails at once has the least to do, and would get every prompt again.

        Returns:
            What ``work`` returned.

        Raises:
            MovedError: another server should do it.
            NoServerError: there is none.
            ConnectionError: the one chosen cannot be reached.
            Exception: whatever ``work`` raised.
        """
        hashes = _block_hashes(ids)
        server = self._choose(hashes, tried)
        tried.add(server)
        server.remember(hashes)
        task = asyncio.ensure_future(work(server.client))
        flight = _Flight(task)
        server.flights[flight] = None
        server.tokens += len(ids)
        try:
            return await task
        except asyncio.CancelledError:
            if flight.moved:
                raise MovedError(flight.moved) from None
            raise
        except ConnectionError as error:
            await self._doubt(server, error)
            raise
        finally:
            del server.flights[flight]
            server.tokens -= len(ids)

    async def wait_healthy(self, grace_s: float) -> bool:
        """Wait up to ``grace_s`` seconds for one of the servers that capture to be up."""
        deadline = asyncio.get_running_loop().time() + grace_s
        while True:
            # A question that was begun in time is not the last one: this process may have been held up meanwhile.
            left = deadline - asyncio.get_running_loop().time()
            # Each time anew: meanwhile servers may be added.
            if await _any(self._is_back(server) for server in self.servers if server.stopped is None):
                return True
            if left <= 0:
                return False
            await asyncio.sleep(min(RETRY_PAUSE_S, left))

    @property
    def unfit(self) -> str:
        """Why servers that are up again get nothing, for the end of a message; empty where there are none."""
        return "".join(
            f"; {server.client.url} is up again, but {server.unfit}" for server in self.servers if server.unfit
        )

    async def flush_cache(self, patience_s: float) -> bool:
        """Empty the prefix cache of every server that is up; whether all did so within ``patience_s`` seconds."""
        clients = [server.client for server in self.servers if server.up]
        return all(await asyncio.gather(*(client.flush_cache(patience_s) for client in clients)))

    def note_stops(self, stops: Mapping[str, HsCaptureError]) -> None:
        """Take work from servers whose capture has stopped, and take those in again that capture anew.

        Args:
            stops: for each replica that has stopped, the reason.

        Raises:
            HsCaptureError: none is left, or it is not known which server it was; the reason of one that stopped.
        """
        errors = self._errors_of(stops)
        latest = None
        for server in self.servers:
            error = errors.get(server)
            if error is not None and server.stopped is None:
                latest = error
                self._stop(server, error)
            elif error is None and server.stopped is not None:
                server.stopped, server.up = None, False
                self._probe(server)
        if errors and len(errors) == len(self.servers):
            raise latest or next(iter(errors.values()))

    def note_ends(self, ended: Collection[str]) -> None:
        """Take work from servers that were told to stop, and would answer nothing any more.

        Args:
            ended: the replicas whose capture was ended in order, such as ``dp0``.
        """
        strays, unknown = self._strays(ended)
        for server in self.servers:
            mine = (server.replicas or frozenset()) & set(ended)
            server.ended = bool(mine) or (bool(strays) and unknown == [server])
            if server.ended and server.up:
                self._lost(server, ConnectionError("it was told to stop"))
                server.let_go(server.flights, f"{server.client.url} was told to stop")

    def look_for_leaving(self) -> None:
        """Ask servers that have work whether they shut down, each now and then; to be called from time to time."""
        now = time.monotonic()
        for server in self.servers:
            if server.usable and server.flights and now - server.asked_at >= LEAVING_S:
                server.asked_at = now
                self._beside(self._ask_leaving(server))

    async def _ask_leaving(self, server: Server) -> None:
        if await server.client.shuts_down() and server in self.servers and server.up:
            server.leaving = True
            self._lost(server, ConnectionError("it shuts down"))

    def rebalance(self) -> None:
        """Give half of what the busiest server has in flight, the latest sent, to those that have nothing to do.

        To be called from time to time. A server counts as without work when it has none at two calls in a row: then
        nothing comes any more, or all that may be in flight is at the others. What the busiest one answers soon is
        left to it. A server that answers nothing for long, and does not say that it lives, is lost.
        """
        usable = [server for server in self.servers if server.usable]
        idle = [server for server in usable if not server.flights]
        waiting = [server for server in idle if server.idle]
        for server in self.servers:
            server.idle = server in idle
        if waiting:
            for server in usable:
                self._ask_if_silent(server)
        busiest = max(usable, key=lambda server: (len(server.flights), server.tokens), default=None)
        if waiting and busiest is not None and len(busiest.flights) > 1:
            flights = list(busiest.flights)
            if time.monotonic() - flights[0].sent_at < SLOW_S:
                return
            latest = flights[len(flights) - len(flights) // 2 :]
            busiest.let_go(latest, f"{busiest.client.url} is slower than others, which have nothing to do")

    def _ask_if_silent(self, server: Server) -> None:
        oldest = next(iter(server.flights), None)
        if oldest is not None and not server.asked and time.monotonic() - oldest.sent_at >= SILENT_S:
            server.asked = True
            self._beside(self._ask(server, oldest))

    async def _ask(self, server: Server, oldest: _Flight) -> None:
        try:
            if server in self.servers and not await server.client.answers() and oldest in server.flights:
                silent = time.monotonic() - oldest.sent_at
                self._lost(server, ConnectionError(f"a prompt is there for {silent:.0f} s, and nothing answers"))
        finally:
            server.asked = False

    def _choose(self, hashes: Sequence[int], tried: set[Server]) -> Server:
        candidates = [server for server in self.servers if server.usable]
        candidates = candidates or [server for server in self.servers if server.captures and not server.stops]
        if not candidates:
            told = any(server.stops for server in self.servers)
            raise NoServerError(f"{self.url}: told to stop" if told else "no server is left")
        candidates = [server for server in candidates if server not in tried] or candidates
        candidates = [server for server in candidates if len(server.flights) < self.max_prompts] or candidates
        least = min(server.tokens for server in candidates)
        free = [server for server in candidates if server.tokens - least <= SLACK_TOKENS]
        return max(free, key=lambda server: (server.known(hashes), -server.tokens))

    def _strays(self, replicas: Iterable[str]) -> tuple[list[str], list[Server]]:
        """Those of the replicas that no server is known to write as, and the servers of which that is not known."""
        known = {replica for server in self.servers for replica in server.replicas or ()}
        unknown = [server for server in self.servers if server.replicas is None]
        return [replica for replica in replicas if replica not in known], unknown

    def _errors_of(self, stops: Mapping[str, HsCaptureError]) -> dict[Server, HsCaptureError]:
        """The servers that have stopped, each with its reason; that of nobody known is the one unknown server's."""
        strays, unknown = self._strays(stops)
        if strays and len(unknown) > 1:
            raise stops[strays[0]]
        found = {server: stops[strays[0]] for server in unknown if strays}
        for server in self.servers:
            mine = sorted((server.replicas or frozenset()) & stops.keys())
            if mine:
                found[server] = stops[mine[0]]
        return found

    def _heir(self) -> str:
        """Who gets the work of a server that cannot be used any more, for a message."""
        return "Its work goes to the other servers." if self.usable else "No other can be used; it is waited for."

    def _stop(self, server: Server, error: HsCaptureError) -> None:
        server.stopped = error
        if any(other.stopped is None for other in self.servers):
            self._say(f"{server.client.url}: {error}. {self._heir()}")
        server.let_go(server.flights, f"{server.client.url}: {error}")

    async def _doubt(self, server: Server, error: ConnectionError) -> None:
        """A connection broke: is the server lost? It is asked once for all prompts.

        One that is well may have closed a connection that was idle, and may as well be another one in its place.
        """
        if not server.up or server not in self.servers:
            return
        if server.check is None or server.check.done():
            server.check = self._beside(self._is_back(server))
        if not await asyncio.shield(server.check):
            self._lost(server, error)

    def _lost(self, server: Server, error: ConnectionError) -> None:
        if server.up and server in self.servers:
            server.up = False
            if len(self.servers) > 1:
                self._say(f"Lost {server.client.url} ({error}). {self._heir()}")
            server.let_go((), "")
            self._probe(server)

    def _probe(self, server: Server) -> None:
        # It may be lost, and its capture stop and begin anew, in any order.
        if not server.awaited:
            server.awaited = True
            self._beside(self._await_return(server))

    def _beside(self, work: Coroutine[Any, Any, Reply]) -> asyncio.Task[Reply]:
        """Have something done while the pool goes on."""
        probe = asyncio.create_task(work)
        self._probes.add(probe)
        probe.add_done_callback(self._probes.discard)
        return probe

    async def _await_return(self, server: Server) -> None:
        loop = asyncio.get_running_loop()
        answered, settled = list(server.flights), loop.time() + SETTLE_S
        try:
            while server in self.servers and not await self._is_back(server):
                if loop.time() >= settled:
                    server.let_go(answered, f"{server.client.url} was lost")
                await asyncio.sleep(RETRY_PAUSE_S)
        finally:
            server.awaited = False
        if server in self.servers:
            server.up = True
            if len(self.servers) > 1 and server.captures:
                self._say(f"{server.client.url} is back.")

    async def _is_back(self, server: Server) -> bool:
        """Whether a server can be reached and is the one it was; where it is another, that is told once."""
        # Of one that was told to stop the HTTP server may live on for a while; a new one has a new session record.
        if server.ended or not await server.client.healthy():
            return False
        if self._check_returned is not None:
            try:
                await self._check_returned(server)
            except HsCaptureError as error:
                if server.unfit is None or str(server.unfit) != str(error):
                    self._say(f"{server.client.url} is up again and gets no work: {error}.")
                server.unfit = error
                return False
        server.unfit, server.leaving = None, False
        return True


async def wait_for_any(clients: Sequence[ServerClient], grace_s: float) -> bool:
    """Wait up to ``grace_s`` seconds until one of the servers is up; whether that came to pass."""
    return await _any(client.wait_healthy(grace_s) for client in clients)


async def _any(questions: Iterable[Coroutine[Any, Any, bool]]) -> bool:
    """Whether one of them is answered with yes; the others are not waited for then."""
    waits = [asyncio.create_task(question) for question in questions]
    try:
        for wait in asyncio.as_completed(waits):
            if await wait:
                return True
        return False
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def _block_hashes(ids: Ids) -> list[int]:
    """The chained hash of the prompt at each multiple of ``BLOCK`` tokens."""
    ends = prefix_hashes(np.asarray(ids, dtype=np.int64), 0, 0)[BLOCK - 1 :: BLOCK]
    return [int(value) for value in ends]
