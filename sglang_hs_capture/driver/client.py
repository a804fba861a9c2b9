"""One server's ``/generate`` over HTTP: many prompts in flight, and every failure told apart by what it calls for."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from sglang_hs_capture.errors import EngineError

CONNECT_TIMEOUT_S = 30.0
HEALTH_TIMEOUT_S = 30.0
RETRY_PAUSE_S = 1.0
MESSAGE_LIMIT = 500
BUSY = (429, 503)
# A capture needs no tokens behind the prompt.
PREFILL_ONLY = {"max_new_tokens": 0, "temperature": 0}


class RefusedError(Exception):
    """The server refuses this prompt and would refuse it again; the text is the server's own."""


class RetryableError(Exception):
    """The server failed on this prompt and may succeed next time; the text is the server's own."""


class Window:
    """Bounds what is in flight, by the number of prompts and by their tokens."""

    def __init__(self, max_prompts: int, max_tokens: int) -> None:
        self._max_prompts = max_prompts
        self._max_tokens = max_tokens
        self._prompts = 0
        self._tokens = 0
        self._freed = asyncio.Event()

    @property
    def prompts(self) -> int:
        """Prompts in flight."""
        return self._prompts

    def _fits(self, tokens: int) -> bool:
        # A prompt larger than the whole window still goes, alone.
        return not self._prompts or (self._prompts < self._max_prompts and self._tokens + tokens <= self._max_tokens)

    async def enter(self, tokens: int) -> None:
        """Wait until a prompt of ``tokens`` tokens fits, and count it."""
        while not self._fits(tokens):
            self._freed.clear()
            await self._freed.wait()
        self._prompts += 1
        self._tokens += tokens

    def leave(self, tokens: int) -> None:
        """Count a prompt of ``tokens`` tokens as done."""
        self._prompts -= 1
        self._tokens -= tokens
        self._freed.set()


class ServerClient:
    """Talks to one SGLang server."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """Open no connection yet.

        Args:
            url: such as ``http://127.0.0.1:30000``.
            api_key: sent as a bearer token where the server wants one.
        """
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            headers=headers,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def prefill(
        self,
        rid: str,
        input_ids: Sequence[int],
        *,
        images: Sequence[str] = (),
        routing_ids: NDArray[np.int64] | None = None,
        bypass_cache: bool = False,
    ) -> None:
        """Send one prompt and wait for the server's reply; a server whose queue is full is asked again.

        Args:
            rid: the request's id.
            input_ids: the prompt's tokens.
            images: for each placeholder among them, in order, an image as a ``data:`` URI or a URL.
            routing_ids: what ``ServerPool`` chooses a server by.
            bypass_cache: compute the whole prompt, whatever the prefix cache holds.

        Raises:
            RefusedError: HTTP 4xx: the prompt itself is the reason.
            RetryableError: HTTP 5xx, an aborted request, or a reply about another number of tokens.
            ConnectionError: the server cannot be reached, or the connection broke.
        """
        body: dict[str, Any] = {"rid": rid, "input_ids": list(input_ids), "sampling_params": PREFILL_ONLY}
        if images:
            body["image_data"] = list(images)
        if bypass_cache:
            # A key that no other request has: SGLang keeps a prefix tree of its own for each.
            body["extra_key"] = rid
        reply = await self._generate(body)
        while reply is None:
            await asyncio.sleep(RETRY_PAUSE_S)
            reply = await self._generate(body)
        meta = reply.get("meta_info", {}) if isinstance(reply, dict) else {}
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            raise RetryableError(f"the server aborted the request: {reason.get('message', 'no reason given')}")
        seen = meta.get("prompt_tokens", len(input_ids))
        # How many positions an image takes is the server's to say.
        if seen < len(input_ids) or (seen > len(input_ids) and not images):
            raise RetryableError(f"the server computed {seen} of the prompt's {len(input_ids)} tokens")

    async def _generate(self, body: Any) -> Any:
        """The server's answer; None if its queue is full."""
        async with self._post("/generate", body) as response:
            if response.status in BUSY:
                return None
            if response.status >= 400:
                await self._raise_for(response)
            return await _json(response)

    @contextlib.asynccontextmanager
    async def _post(self, path: str, body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._session.post(self.url + path, json=body) as response:
                yield response
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, OSError) as error:
            raise ConnectionError(f"{self.url}: {type(error).__name__}: {error}") from error

    async def _raise_for(self, response: aiohttp.ClientResponse) -> None:
        message = f"HTTP {response.status}: {_message(await response.text())}"
        if response.status in (401, 403, 404):
            raise EngineError(f"{self.url}/generate: {message}; is this an SGLang server, and is the API key right?")
        # The prompt is not to blame for a request id that is still in flight.
        if response.status >= 500 or response.status == 408 or "Duplicate request ID" in message:
            raise RetryableError(message)
        raise RefusedError(message)

    async def healthy(self) -> bool:
        """Whether the server answers and says that it is up."""
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
            async with self._session.get(f"{self.url}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def wait_healthy(self, grace_s: float) -> bool:
        """Wait up to ``grace_s`` seconds for the server to be up."""
        deadline = time.monotonic() + grace_s
        while not await self.healthy():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(RETRY_PAUSE_S)
        return True

    async def server_info(self) -> dict[str, Any]:
        """The server's own account of its settings; empty where it gives none."""
        for path in ("/server_info", "/get_server_info"):
            try:
                async with self._session.get(self.url + path) as response:
                    if response.status == 200:
                        info = await _json(response)
                        return info if isinstance(info, dict) else {}
            except (aiohttp.ClientError, TimeoutError, OSError):
                return {}
        return {}


async def _json(response: aiohttp.ClientResponse) -> Any:
    try:
        return await response.json(content_type=None)
    except ValueError as error:
        raise RetryableError(f"the server's reply is not JSON: {error}") from None


def _message(text: str) -> str:
    """The server's message out of an error reply, on one line."""
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return " ".join(str(found).split())[:MESSAGE_LIMIT] or "no message"
