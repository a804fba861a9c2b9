"""Where prompts go: a server started for this run, or one that is running already."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_hs_capture.config import CONFIG_KEY, CaptureConfig
from sglang_hs_capture.driver.client import ServerClient
from sglang_hs_capture.driver.launch import LaunchPlan
from sglang_hs_capture.driver.pool import Say, Server, ServerPool
from sglang_hs_capture.driver.preflight import check_plugin
from sglang_hs_capture.driver.server import ManagedServer
from sglang_hs_capture.errors import ConfigError, DatasetMismatchError, EngineError
from sglang_hs_capture.model_config import ModelConfig
from sglang_hs_capture.store.identity import DATASET_FILE, read_info
from sglang_hs_capture.store.recovery import recover_dataset
from sglang_hs_capture.store.schema import DatasetInfo
from sglang_hs_capture.store.session import (
    SessionRecord,
    is_running,
    missing_columns,
    read_sessions,
    replica_names,
    replica_of,
    write_session,
)


class Target(ABC):
    """The servers that capture into the dataset."""

    pool: ServerPool

    @abstractmethod
    async def open(self, say: Say) -> list[SessionRecord]:
        """Make sure that the servers are up and capture.

        Args:
            say: shows one line to the user.

        Returns:
            The session records of their writers.

        Raises:
            HsCaptureError: it is not, or does not; where it refused to capture, of the class of its own reason.
        """

    @abstractmethod
    def check_alive(self) -> None:
        """Raise if no server is left.

        Raises:
            HsCaptureError: with the reason as far as it is known.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of the servers."""

    @abstractmethod
    def kill(self) -> None:
        """Let go of them at once."""


class OwnServer(Target):
    """A server that lives for this run alone."""

    def __init__(
        self, plan: LaunchPlan, directory: Path, model: ModelConfig | None, start_timeout_s: float, notice: str = ""
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._architectures = model.architectures if model else ()
        self._start_timeout_s = start_timeout_s
        self._notice = notice
        self._server = ManagedServer(plan, directory)
        self._started = False

    async def open(self, say: Say) -> list[SessionRecord]:
        if self._notice:
            say(self._notice)
        say("Checking that SGLang loads the capture classes ...")
        capture_class = await check_plugin(self._architectures, self._plan.environment)
        say(f"Starting SGLang with {capture_class}; its output goes to {self._server.log_path}")
        self._started = True
        client = ServerClient(self._plan.url, api_key=self._plan.api_key)
        self.pool = ServerPool([Server(client)], say)
        self._server.start()
        sessions = await self._server.wait_ready(client, self._start_timeout_s)
        say(f"SGLang {sessions[0].sglang_version} is up and captures {', '.join(sessions[0].model['columns'])}.")
        return sessions

    def check_alive(self) -> None:
        self._server.check_alive()

    async def close(self) -> None:
        """Stop the server, and finish the shards in case it was in no state to."""
        if not self._started:
            return
        await self.pool.close()
        await self._server.stop()
        if (self._directory / DATASET_FILE).exists():
            recover_dataset(self._directory)
        for record in self._server.sessions():
            # SGLang kills schedulers that do not end in time, as those of a pipeline; the dataset is in order now.
            if record.state == "ready" and is_running(record) is False:
                record.state = "closed"
                write_session(self._directory, record)

    def kill(self) -> None:
        self._server.kill()


class RunningServers(Target):
    """One server or several that somebody else started and will stop."""

    def __init__(
        self,
        urls: Sequence[str],
        directory: Path,
        expected: Callable[[DatasetInfo], list[str]],
        api_key: str | None,
        grace_s: float,
    ) -> None:
        """Connect to nothing yet.

        Args:
            urls: the servers'.
            directory: the dataset they capture into.
            expected: names the settings that the user asked for and the dataset does not have.
            api_key: for servers that want one.
            grace_s: how long a server may take to answer.
        """
        self._urls = list(dict.fromkeys(url.rstrip("/") for url in urls))
        self._directory = directory
        self._expected = expected
        self._api_key = api_key
        self._grace_s = grace_s
        self._opened = False

    async def open(self, say: Say) -> list[SessionRecord]:
        servers = [Server(ServerClient(url, api_key=self._api_key)) for url in self._urls]
        self.pool = ServerPool(servers, say, self._check_returned)
        self._opened = True
        clients = [server.client for server in self.pool.servers]
        ups = await asyncio.gather(*(client.wait_healthy(self._grace_s) for client in clients))
        for server, up in zip(self.pool.servers, ups, strict=True):
            if not up:
                raise EngineError(
                    f"{server.client.url}: no healthy SGLang server answered within {self._grace_s:g} s; check the "
                    "URL, and that the server is up"
                )
            server.replicas = await self._ask_replicas(server)
        where = self.pool.url
        sessions = [record for record in read_sessions(self._directory) if record.state in ("ready", "stopped")]
        sessions = [record for record in sessions if is_running(record) is not False]
        if not sessions:
            raise EngineError(
                f"{where} answers, but no server captures into {self._directory}: start it with `hs-capture serve "
                f"--output {self._directory}`, and see its log for a warning about sglang_hs_capture"
            )
        sessions = self._check_replicas(sessions)
        self.check_settings()
        say(f"The server at {where} captures {', '.join(sessions[0].model['columns'])} into {self._directory}.")
        return sessions

    def check_settings(self) -> None:
        """Compare what the dataset holds with what was asked for; the servers are not needed for it.

        Raises:
            DatasetMismatchError: they differ.
            StoreError: there is no dataset.
        """
        if differences := self._expected(read_info(self._directory)):
            raise DatasetMismatchError(
                f"the server of {self._directory} captures differently: {'; '.join(differences)}; leave these options "
                "out, or start the server with them"
            )

    def _check_replicas(self, sessions: list[SessionRecord]) -> list[SessionRecord]:
        """See that each server has a writer for every column, under a name of its own.

        Returns:
            The records of this run's servers. Those of others, which may have died on their machines long ago, say
            nothing of what these servers take; they are left in only where a server does not tell its names.
        """
        replicas = sorted({replica_of(record) for record in sessions})
        claimed: dict[str, str] = {}
        for server in self.pool.servers:
            url, mine = server.client.url, sorted(server.replicas or ())
            for replica in mine:
                if replica in claimed:
                    raise EngineError(
                        f"{claimed[replica]} and {url} both capture as {replica}: name a server once, if they are the "
                        "same; else start each with a --replica of its own"
                    )
                claimed[replica] = url
            if not set(mine) <= set(replicas):
                raise EngineError(
                    f"{url} should capture as {', '.join(mine)} into {self._directory}, and only "
                    f"{', '.join(replicas)} are there; see that server's log for a warning about sglang_hs_capture"
                )
        # Of those that do not tell, each must be one of the replicas that nobody else is.
        untold = [server.client.url for server in self.pool.servers if server.replicas is None]
        left = [replica for replica in replicas if replica not in claimed]
        if len(left) < len(untold):
            raise EngineError(
                f"expected {len(self._urls)} servers that capture into {self._directory}, found {', '.join(replicas)}; "
                f"{', '.join(untold)} cannot all be among them: start each with a --replica of its own"
            )
        if not untold:
            sessions = [record for record in sessions if replica_of(record) in claimed]
        for replica in dict.fromkeys(map(replica_of, sessions)):
            if missing := missing_columns(record for record in sessions if replica_of(record) == replica):
                raise EngineError(
                    f"{self.pool.url}: no process of {replica} captures {', '.join(missing)} into "
                    f"{self._directory}: expected one of each pipeline stage that has such layers; see the server's log"
                )
        return sessions

    async def _ask_replicas(self, server: Server) -> frozenset[str] | None:
        """The names under which a server's processes write; None where it does not tell its settings.

        Raises:
            EngineError: it captures into another directory.
        """
        info = await server.client.server_info()
        capture = capture_of(info)
        if capture is None:
            return None
        if Path(capture.output_dir).resolve() != self._directory.resolve():
            raise EngineError(
                f"the server at {server.client.url} captures into {capture.output_dir}, not into --output "
                f"{self._directory}; give the server's own directory"
            )
        ranks = max(size for name in ("dp_size", "attn_dp_size") if type(size := info.get(name, 1) or 1) is int)
        return replica_names(capture.replica, ranks)

    async def _check_returned(self, server: Server) -> None:
        """See that a server that was lost and is up again captures as it did before.

        Raises:
            EngineError: it does not.
        """
        now = await self._ask_replicas(server)
        if server.replicas is not None and now != server.replicas:
            before = ", ".join(sorted(server.replicas))
            raise EngineError(
                f"it captured as {before} before and now "
                + (f"as {', '.join(sorted(now))}" if now else "does not say that it captures")
                + "; start it as it was started at first"
            )

    def check_alive(self) -> None:
        """Nothing is known of somebody else's process; a lost connection tells."""

    async def close(self) -> None:
        if self._opened:
            await self.pool.close()

    def kill(self) -> None:
        """Somebody else's server goes on."""


def capture_of(server_info: Mapping[str, Any]) -> CaptureConfig | None:
    """A server's capture settings, from its own account of its settings; None where it does not tell."""
    try:
        overrides = json.loads(server_info.get("json_model_override_args") or "{}")
        if CONFIG_KEY not in overrides:
            overrides = json.loads((Path(server_info["model_path"]) / "config.json").read_text(encoding="utf-8"))
        return CaptureConfig.from_mapping(overrides[CONFIG_KEY])
    except (OSError, ValueError, TypeError, KeyError, ConfigError):
        return None
