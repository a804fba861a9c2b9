"""One server's ``/generate`` over HTTP: many prompts in flight, and every failure told apart by what it calls for."""

import asyncio
import contextlib
import json
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import aiohttp

from sglang_hs_capture.errors import EngineError
from sglang_hs_capture.store.known_answers import finite_or_none
from sglang_hs_capture.text import one_line, shown

CONNECT_TIMEOUT_S = 30.0
# For questions beside the work, which a server answers at once or not at all.
ASIDE_TIMEOUT = aiohttp.ClientTimeout(total=30.0)
RETRY_PAUSE_S = 1.0
# SGLang closes a connection that was idle for 5 s. One that it is just closing must not get a prompt.
IDLE_S = 2.0
# An SGLang that shuts down says so at once; one that is only held up says that it is ill after 20 s.
AT_ONCE_S = 5.0
MESSAGE_LIMIT = 500
BUSY = (429, 503)
BUSY_REPLY = object()
# A capture needs no tokens behind the prompt.
PREFILL_ONLY = {"max_new_tokens": 0, "temperature": 0}


class RefusedError(Exception):
    """The server refuses this prompt and would refuse it again; the text is the server's own."""


class RetryableError(Exception):
    """The server failed on this prompt and may succeed next time; the text is the server's own."""


class Prediction(NamedTuple):
    """What the engine predicted at some positions of a prompt.

    Attributes:
        logprobs: of the token that follows in the prompt; None where it was not finite.
        top: the likeliest token.
    """

    logprobs: tuple[float | None, ...]
    top: tuple[int, ...]


class Window:
    """Bounds what is in flight, by the number of prompts and by their tokens."""

    def __init__(self, limits: Callable[[], tuple[int, int]]) -> None:
        """
        Args:
            limits: the most prompts and the most tokens, at the moment.
        """
        self._limits = limits
        self._prompts = 0
        self._tokens = 0
        self._freed = asyncio.Event()

    @property
    def prompts(self) -> int:
        """Prompts in flight."""
        return self._prompts

    def _fits(self, tokens: int) -> bool:
        # A prompt larger than the whole window still goes, alone.
        max_prompts, max_tokens = self._limits()
        return not self._prompts or (self._prompts < max_prompts and self._tokens + tokens <= max_tokens)

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
            url: such as ``http://127.0.0.1:30000``. A user and a password in it are sent, and shown in no message.
            api_key: sent as a bearer token where the server wants one.
        """
        parts = urlsplit(url.rstrip("/"))
        credentials, _, place = parts.netloc.rpartition("@")
        user, _, password = credentials.partition(":")
        self.url = parts._replace(netloc=place).geturl()
        login = f"{unquote(user)}:{unquote(password)}"
        headers = {"Authorization": f"Basic {b64encode(login.encode()).decode()}"} if credentials else {}
        if api_key:
            headers = {"Authorization": f"Bearer {api_key}"}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
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
        bypass_cache: bool = False,
        predict_from: int | None = None,
    ) -> Prediction | None:
        """Send one prompt and wait for the server's reply; a server whose queue is full is asked again.

        Args:
            rid: the request's id.
            input_ids: the prompt's tokens.
            images: for each placeholder among them, in order, an image as a ``data:`` URI or a URL.
            bypass_cache: compute the whole prompt, whatever the prefix cache holds.
            predict_from: the position from which on predictions are wanted; SGLang computes the prompt anew from there.

        Returns:
            The predictions at positions ``predict_from`` to S - 2; None if none are wanted or the reply has none.

        Raises:
            RefusedError: HTTP 4xx: the prompt itself is the reason, or that predictions are wanted.
            RetryableError: HTTP 5xx, an aborted request, or a reply about another number of tokens.
            ConnectionError: the server cannot be reached, or the connection broke.
        """
        body: dict[str, Any] = {"rid": rid, "input_ids": list(input_ids), "sampling_params": PREFILL_ONLY}
        if images:
            body["image_data"] = list(images)
        if bypass_cache:
            # A key that no other request has: SGLang keeps a prefix tree of its own for each.
            body["extra_key"] = rid
        if predict_from is not None:
            body |= {"return_logprob": True, "logprob_start_len": predict_from, "top_logprobs_num": 1}
        _, meta = await self._answered(body)
        seen = meta.get("prompt_tokens", len(input_ids))
        if type(seen) is not int:
            raise RetryableError(f"expected a number of tokens in the server's reply, got {shown(seen)}")
        # How many positions an image takes is the server's to say.
        if seen < len(input_ids) or (seen > len(input_ids) and not images):
            raise RetryableError(f"the server computed {seen} of the prompt's {len(input_ids)} tokens")
        return None if predict_from is None else _prediction(meta, len(input_ids) - 1 - predict_from)

    async def answer(self, rid: str, input_ids: Sequence[int], sampling: Mapping[str, Any]) -> tuple[list[int], str]:
        """Let the model answer one prompt.

        Args:
            rid: the request's id.
            input_ids: the prompt's tokens.
            sampling: SGLang's ``sampling_params``.

        Returns:
            The answer's token ids, the one that ended it included, and why it ended: ``stop`` or ``length``.

        Raises:
            RefusedError, RetryableError, ConnectionError: as for ``prefill``.
        """
        reply, meta = await self._answered(
            {"rid": rid, "input_ids": list(input_ids), "sampling_params": dict(sampling)}
        )
        answer = reply.get("output_ids") or []
        if not isinstance(answer, list) or not all(type(token) is int for token in answer):
            raise RetryableError(f"expected token ids in the server's reply, got {shown(answer)}")
        reason = meta.get("finish_reason")
        finish = reason if isinstance(reason, dict) else {}
        if finish.get("type") not in ("stop", "length"):
            raise RetryableError(f"the server ended the answer for another reason than its end or length: {reason}")
        ended_by = finish.get("matched")
        if type(ended_by) is int and answer[-1:] != [ended_by]:
            answer.append(ended_by)
        if not answer:
            raise RetryableError("the server's answer has no tokens")
        return answer, str(finish["type"])

    async def flush_cache(self, patience_s: float) -> bool:
        """Empty the prefix cache; whether the server did so within ``patience_s`` seconds.

        SGLang refuses while a request is in flight, and for a moment after its reply.
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                async with self._session.post(f"{self.url}/flush_cache", timeout=ASIDE_TIMEOUT) as response:
                    if response.status == 200:
                        return True
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _answered(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The server's reply and its ``meta_info``; a server whose queue is full is asked again."""
        while (reply := await self._generate(body)) is BUSY_REPLY:
            await asyncio.sleep(RETRY_PAUSE_S)
        meta = reply.get("meta_info", {}) if isinstance(reply, dict) else None
        if not isinstance(meta, dict):
            raise RetryableError(f"expected an object with meta_info as the server's reply, got {shown(reply)}")
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            raise RetryableError(f"the server aborted the request: {reason.get('message', 'no reason given')}")
        return reply, meta

    async def _generate(self, body: Any) -> Any:
        """The server's answer; ``BUSY_REPLY`` if its queue is full."""
        async with self._post("/generate", body) as response:
            if response.status in BUSY:
                return BUSY_REPLY
            if response.status >= 300:
                await self._raise_for(response)
            return await _json(response)

    @contextlib.asynccontextmanager
    async def _post(self, path: str, body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            # A redirected POST would arrive as a GET, which the server refuses, as if the prompt were at fault.
            async with self._session.post(self.url + path, json=body, allow_redirects=False) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectionError(f"{self.url}: {type(error).__name__}: {one_line(str(error))}") from error

    async def _raise_for(self, response: aiohttp.ClientResponse) -> None:
        if response.status < 400:
            raise EngineError(
                f"{self.url}/generate: HTTP {response.status} leads to {shown(response.headers.get('Location', ''))}; "
                "give the URL of the server itself"
            )
        message = f"HTTP {response.status}: {_message((await response.read()).decode(errors='replace'))}"
        if response.status in (401, 403, 404, 405):
            raise EngineError(f"{self.url}/generate: {message}; is this an SGLang server, and is the API key right?")
        # The prompt is not to blame for a request id that is still in flight.
        if response.status >= 500 or response.status == 408 or "Duplicate request ID" in message:
            raise RetryableError(message)
        raise RefusedError(message)

    async def healthy(self) -> bool:
        """Whether the server answers and says that it is up."""
        return await self._health() == 200

    async def shuts_down(self) -> bool:
        """Whether the server says that it takes no more work, though it would: it ends when it has none."""
        began = time.monotonic()
        return await self._health() == 503 and time.monotonic() - began < AT_ONCE_S

    async def answers(self) -> bool:
        """Whether anything comes back from the server, be it that it is busy or ill."""
        return await self._health() is not None

    async def _health(self) -> int | None:
        """The HTTP status of the server's account of its health; None if nothing comes back."""
        try:
            async with self._session.get(f"{self.url}/health", timeout=ASIDE_TIMEOUT) as response:
                return response.status
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

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
                async with self._session.get(self.url + path, timeout=ASIDE_TIMEOUT) as response:
                    if response.status == 200:
                        info = await _json(response)
                        return info if isinstance(info, dict) else {}
            except (aiohttp.ClientError, RetryableError, TimeoutError, OSError):
                return {}
        return {}


def _prediction(meta: Mapping[str, Any], positions: int) -> Prediction | None:
    """The predictions in a reply, of which the first entry stands for the token that nothing is predicted from."""
    try:
        logprobs = finite_or_none([entry[0] for entry in meta["input_token_logprobs"][1:]])
        top = tuple(int(entry[0][1]) for entry in meta["input_top_logprobs"][1:])
    except (KeyError, TypeError, IndexError, ValueError, OverflowError):
        return None
    return Prediction(logprobs, top) if len(logprobs) == len(top) == positions else None


async def _json(response: aiohttp.ClientResponse) -> Any:
    try:
        return await response.json(content_type=None)
    except (ValueError, RecursionError) as error:
        raise RetryableError(f"the server's reply is not JSON: {error}") from None


def _message(text: str) -> str:
    """The server's message out of an error reply, on one line."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return " ".join(str(found).split())[:MESSAGE_LIMIT] or "no message"
