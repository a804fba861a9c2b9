"""Several servers that capture into one dataset: a prompt goes where its prefix is, unless others have less to do."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.driver.client import RETRY_PAUSE_S, ServerClient
from sglang_hs_capture.store.hashing import prefix_hashes

# Prefixes are looked up at multiples of so many tokens; a shorter one is cheaper to compute again than to look for.
BLOCK = 64
# A server with so many tokens more in flight than the least busy one gets no more for the sake of a prefix.
SLACK_TOKENS = 2**16
REMEMBERED = 2**20


class _Server:
    """One server, what it has in flight, and which prefixes it was sent."""

    def __init__(self, client: ServerClient) -> None:
        self.client = client
        self.tokens = 0
        self.up = True
        self._prefixes: OrderedDict[int, None] = OrderedDict()

    def known(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's blocks, from its beginning, it has computed or is computing."""
        count = 0
        for value in hashes:
            if value not in self._prefixes:
                break
            count += 1
        return count

    def remember(self, hashes: Sequence[int]) -> None:
        for value in hashes:
            self._prefixes[value] = None
            self._prefixes.move_to_end(value)
        while len(self._prefixes) > REMEMBERED:
            self._prefixes.popitem(last=False)

    def forget_all(self) -> None:
        """A server that comes back has an empty cache."""
        self._prefixes.clear()


class ServerPool:
    """Talks to several servers as ``ServerClient`` does to one.

    A server that cannot be reached gets nothing more until it is healthy again; what it had in flight fails with
    ``ConnectionError`` and is sent again by whoever asked, to another one.
    """

    def __init__(self, clients: Sequence[ServerClient]) -> None:
        self._servers = [_Server(client) for client in clients]
        self._probes: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """All servers', for messages."""
        return ", ".join(server.client.url for server in self._servers)

    async def close(self) -> None:
        """Close all connections."""
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        for server in self._servers:
            await server.client.close()

    async def prefill(
        self,
        rid: str,
        input_ids: Sequence[int],
        *,
        images: Sequence[str] = (),
        routing_ids: NDArray[np.int64] | None = None,
        bypass_cache: bool = False,
    ) -> None:
        """Send one prompt to one server and wait for its reply: see ``ServerClient.prefill``.

        The server is chosen by ``routing_ids``, or by ``input_ids`` where there are none.

        Raises:
            RefusedError, RetryableError, ConnectionError: as there.
        """
        route = np.asarray(input_ids, dtype=np.int64) if routing_ids is None else routing_ids
        hashes = _block_hashes(route)
        server = self._choose(hashes)
        server.remember(hashes)
        server.tokens += len(route)
        try:
            await server.client.prefill(rid, input_ids, images=images, bypass_cache=bypass_cache)
        except ConnectionError:
            self._lost(server)
            raise
        finally:
            server.tokens -= len(route)

    async def healthy(self) -> bool:
        """Whether one of the servers is up."""
        return any(await asyncio.gather(*(server.client.healthy() for server in self._servers)))

    async def wait_healthy(self, grace_s: float) -> bool:
        """Wait up to ``grace_s`` seconds for one of the servers to be up."""
        return await wait_for_any([server.client for server in self._servers], grace_s)

    async def server_info(self) -> dict[str, Any]:
        """The first server's account of its settings."""
        return await self._servers[0].client.server_info()

    def _choose(self, hashes: Sequence[int]) -> _Server:
        up = [server for server in self._servers if server.up] or self._servers
        least = min(server.tokens for server in up)
        free = [server for server in up if server.tokens - least <= SLACK_TOKENS]
        return max(free, key=lambda server: (server.known(hashes), -server.tokens))

    def _lost(self, server: _Server) -> None:
        if server.up:
            server.up = False
            server.forget_all()
            probe = asyncio.create_task(self._await_return(server))
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)

    async def _await_return(self, server: _Server) -> None:
        while not await server.client.healthy():
            await asyncio.sleep(RETRY_PAUSE_S)
        server.up = True


async def wait_for_any(clients: Sequence[ServerClient], grace_s: float) -> bool:
    """Wait up to ``grace_s`` seconds until one of the servers is up; whether that came to pass."""
    waits = [asyncio.create_task(client.wait_healthy(grace_s)) for client in clients]
    try:
        for wait in asyncio.as_completed(waits):
            if await wait:
                return True
        return False
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def _block_hashes(ids: NDArray[np.int64]) -> list[int]:
    """The chained hash of the prompt at each multiple of ``BLOCK`` tokens."""
    ends = prefix_hashes(ids, 0, 0)[BLOCK - 1 :: BLOCK]
    return [int(value) for value in ends]
