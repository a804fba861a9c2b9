"""Servers that answer something else than SGLang does: each reply leads to a told failure, and none to a traceback."""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sglang_hs_capture.driver import client
from sglang_hs_capture.driver.client import RetryableError, ServerClient
from sglang_hs_capture.errors import EngineError

HEAD = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n%s"


def reply(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    return HEAD % (status, len(body), more, body)


def ask(answer: bytes, question: Callable[[ServerClient], Awaitable[Any]], user: str = "") -> tuple[Any, bytes]:
    """Put a question to a server that answers these bytes; what came of it, and what the server was sent."""
    sent = bytearray()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent.extend(await reader.read(65536))
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def main() -> Any:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        asked = ServerClient(f"http://{user}127.0.0.1:{port}/")
        try:
            return await asyncio.wait_for(question(asked), 10)
        finally:
            await asked.close()
            server.close()

    return asyncio.run(main()), bytes(sent)


def prefill(asked: ServerClient) -> Awaitable[Any]:
    return asked.prefill("r", [1, 2, 3], predict_from=0)


@pytest.mark.parametrize(
    ("answer", "raised", "said"),
    [
        (reply(b""), RetryableError, "expected an object with meta_info"),
        (reply(b"null"), RetryableError, "got None"),
        (reply(b"[1]"), RetryableError, "got \\[1\\]"),
        (reply(b'{"meta_info": null}'), RetryableError, "expected an object with meta_info"),
        (reply(b'{"meta_info": {"prompt_tokens": "3"}}'), RetryableError, "expected a number of tokens .* got '3'"),
        (reply(b"<html>"), RetryableError, "not JSON"),
        (reply(b"[" * 100_000), RetryableError, "not JSON"),
        (reply(b"\xff\xfe", b"500 No"), RetryableError, "HTTP 500"),
        (reply(b"[" * 100_000, b"500 No"), RetryableError, "HTTP 500"),
        (reply(b"", b"301 Moved", b"Location: https://there/\r\n"), EngineError, "301 leads to 'https://there/'; give"),
        (reply(b"", b"405 No"), EngineError, "is this an SGLang server"),
        (b"hello\r\n\r\n", ConnectionError, "127.0.0.1:[0-9]+: "),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", ConnectionError, "127.0.0.1:[0-9]+: "),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000, ConnectionError, "127.0.0.1:[0-9]+: "),
    ],
)
def test_a_reply_that_is_none_of_sglangs_is_told(answer, raised, said):
    with pytest.raises(raised, match=said):
        ask(answer, prefill)


def test_predictions_that_are_no_numbers_are_none():
    huge = b"9" * 400
    meta = b'"prompt_tokens": 3, "input_token_logprobs": [[%s, 1], [%s, 1], [%s, 1]]' % (huge, huge, huge)
    assert ask(reply(b'{"meta_info": {%s, "input_top_logprobs": [0, [[1, 2]], [[1, 2]]]}}' % meta), prefill)[0] is None


@pytest.mark.parametrize("tokens", [b'"abc"', b'["1"]', b"[1.5]", b"7"])
def test_an_answer_that_is_no_token_ids_is_told(tokens):
    body = b'{"output_ids": %s, "meta_info": {"finish_reason": {"type": "stop"}}}' % tokens
    with pytest.raises(RetryableError, match="expected token ids"):
        ask(reply(body), lambda asked: asked.answer("r", [1], {}))


@pytest.mark.parametrize("answer", [reply(b"<html>"), reply(b"[1]"), b"hello\r\n\r\n"])
def test_a_server_without_settings_has_none(answer):
    assert ask(answer, lambda asked: asked.server_info())[0] == {}


def test_a_server_that_accepts_and_answers_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(client, "ASIDE_TIMEOUT", client.aiohttp.ClientTimeout(total=0.2))

    async def main() -> None:
        async def handle(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(5)

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        asked = ServerClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        questions = asked.healthy(), asked.answers(), asked.server_info(), asked.flush_cache(0)
        assert await asyncio.wait_for(asyncio.gather(*questions), 4) == [False, False, {}, False]
        await asked.close()
        server.close()

    asyncio.run(main())


def test_a_connection_that_was_idle_for_long_gets_no_prompt(monkeypatch):
    """The server is about to close it: a prompt that is sent just then would be lost."""
    monkeypatch.setattr(client, "IDLE_S", 0.1)
    connections = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(reply(b"{}"))
            await writer.drain()

    async def main() -> list[int]:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        asked = ServerClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        counts = []
        for pause in (0.0, 0.0, 0.3):
            await asyncio.sleep(pause)
            assert await asked.healthy()
            counts.append(len(connections))
        await asked.close()
        server.close()
        return counts

    assert asyncio.run(main()) == [1, 1, 2]


@pytest.mark.parametrize(
    ("answer", "leaves"),
    [(reply(b"", b"503 Service Unavailable"), True), (reply(b""), False), (reply(b"", b"500 No"), False), (b"", False)],
)
def test_a_server_that_shuts_down_says_so(answer, leaves):
    assert ask(answer, lambda asked: asked.shuts_down())[0] is leaves


def test_a_server_that_is_held_up_does_not_shut_down(monkeypatch):
    """SGLang says the same, HTTP 503, when nothing came of a question for 20 s."""
    monkeypatch.setattr(client, "AT_ONCE_S", 0.0)
    assert ask(reply(b"", b"503 Service Unavailable"), lambda asked: asked.shuts_down())[0] is False


def test_a_password_is_sent_and_not_shown():
    url = []

    async def question(asked: ServerClient) -> bool:
        url.append(asked.url)
        return await asked.healthy()

    healthy, sent = ask(reply(b""), question, "me:s%3Aecret@")
    assert healthy
    assert b"Authorization: Basic " + base64.b64encode(b"me:s:ecret") in sent
    assert "ecret" not in url[0]
