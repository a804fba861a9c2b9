"""One node's part of an engine that runs on a Ray cluster: a child process beside an actor. It needs no Ray itself."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hs_capture.config import CaptureConfig
from sglang_hs_capture.driver.client import ServerClient
from sglang_hs_capture.driver.launch import plan_server
from sglang_hs_capture.driver.server import ManagedServer, free_port
from sglang_hs_capture.errors import EngineError, HsCaptureError

# A shared file system may show a new file to another node this much later.
SHARED_S = 15.0


@dataclass(frozen=True)
class EngineRequest:
    """What every engine of a run is started with.

    Attributes:
        model: a directory, or a hub id, on the nodes.
        capture: the capture settings; ``replica`` is the first engine's.
        sglang_args: the user's own flags for SGLang.
        cpu: run on the CPU platform.
        nodes: nodes of one engine.
        start_timeout_s: how long one may take to start.
        marker: a file of this run in the dataset's directory, which a node must see.
        generates: whether it is to generate.
    """

    model: str
    capture: CaptureConfig
    sglang_args: tuple[str, ...]
    cpu: bool
    nodes: int
    start_timeout_s: float
    marker: str
    generates: bool = False

    @property
    def directory(self) -> Path:
        """The dataset's."""
        return Path(self.capture.output_dir)


class EngineHost:
    """Starts and watches SGLang on one node. Called from one thread, the main one, in which the child is to live."""

    def __init__(self, request: EngineRequest, where: str) -> None:
        """See that this node has the dataset's directory.

        Args:
            where: this node's address.

        Raises:
            EngineError: it has not.
        """
        self._request, self._where = request, where
        self._server: ManagedServer | None = None
        deadline = time.monotonic() + SHARED_S
        while not (request.directory / request.marker).exists():
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"the node {where} does not see the dataset {request.directory}: with --ray it must lie on a file "
                    "system that all nodes share; for disks of their own run hs-capture on each node with a part of "
                    "the data, and join the datasets by hs-capture merge"
                )
            time.sleep(0.5)

    def ports(self) -> tuple[str, int, int]:
        """This node's address, and two ports that are free now."""
        return self._where, free_port(), free_port()

    def start(self, capture: Mapping[str, Any], host: str, port: int, dist: str, rank: int) -> None:
        """Start this node's processes.

        Args:
            capture: the engine's own capture settings.
            host: the first node's address, where the engine will answer.
            port: its port.
            dist: where an engine of several nodes meets; unused otherwise.
            rank: this node's number.
        """
        request = self._request
        # The other nodes listen as well, to be asked whether they are well, each at its own address.
        host, port = (self._where, free_port()) if rank else (host, port)
        flags = ["--host", host, "--port", str(port)]
        if request.nodes > 1:
            flags += ["--nnodes", str(request.nodes), "--node-rank", str(rank), "--dist-init-addr", dist]
        settings = CaptureConfig.from_mapping(dict(capture))
        plan = plan_server(
            request.model,
            settings,
            [*flags, *request.sglang_args],
            cpu=request.cpu,
            own=True,
            generates=request.generates,
        )
        name = f"server-dp{settings.replica}" + (f"-node{rank}" if request.nodes > 1 else "") + ".log"
        self._server = ManagedServer(plan, request.directory, name)
        self._server.start()

    def wait_ready(self) -> tuple[str, str | None]:
        """Wait until the engine captures; on its first node.

        Returns:
            Its URL and the key that its requests must carry.

        Raises:
            HsCaptureError: it refused, died or took too long; see ``ManagedServer.wait_ready``.
        """
        server = self._started()

        async def wait() -> None:
            client = ServerClient(server.plan.url, api_key=server.plan.api_key)
            try:
                await server.wait_ready(client, self._request.start_timeout_s)
            finally:
                await client.close()

        asyncio.run(wait())
        return server.plan.url, server.plan.api_key

    def check(self) -> HsCaptureError | None:
        """Why this node's processes have ended; None while they run."""
        try:
            self._started().check_alive()
        except HsCaptureError as error:
            return error
        return None

    def stop(self) -> None:
        """End them in order."""
        if self._server is not None:
            asyncio.run(self._server.stop())

    def _started(self) -> ManagedServer:
        if self._server is None:
            raise EngineError(f"the node {self._where} was asked about an engine that it did not start")
        return self._server
