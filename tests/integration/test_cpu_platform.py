"""The engine on the CPU platform, without any capture, computes what ``transformers`` computes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sglang_hs_capture.verify.parity import ReferenceModel, load_reference

from .conftest import Server, StartServer, running_server

pytestmark = pytest.mark.engine

CHUNK = 64
LOGPROB_TOLERANCE = 1e-4


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids without control tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(32, 2000, (length,), generator=generator).tolist()


@pytest.fixture(scope="module", params=["deepseek_checkpoint", "kimi_checkpoint"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> ReferenceModel:
    return load_reference(checkpoint)


@pytest.fixture(scope="module")
def server(checkpoint: Path, start_server: StartServer) -> Server:
    return start_server(checkpoint, "--chunked-prefill-size", str(CHUNK))


def input_logprobs(server: Server, tokens: list[int], start: int = 0) -> torch.Tensor:
    """Log-probability of each of ``tokens[start + 1 :]`` given those before it, as the engine reports it."""
    answer = server.generate(tokens, return_logprob=True, logprob_start_len=start)
    return torch.tensor([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])


def expected_logprobs(reference: ReferenceModel, tokens: list[int]) -> torch.Tensor:
    logprobs = reference.logits(tokens).log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize("length", [2, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 7])
def test_input_logprobs_agree_with_transformers(server: Server, reference: ReferenceModel, length: int) -> None:
    tokens = prompt(length, seed=length)
    got, expected = input_logprobs(server, tokens), expected_logprobs(reference, tokens)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < LOGPROB_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [("--page-size", "16"), ("--disable-radix-cache",), ("--tp-size", "2"), ("--pp-size", "2")], ids=" ".join
)
def test_input_logprobs_agree_with_transformers_in_other_configurations(
    kimi_checkpoint: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    tokens = prompt(3 * CHUNK + 9, seed=40)
    expected = expected_logprobs(load_reference(kimi_checkpoint), tokens)
    chunked = ("--chunked-prefill-size", str(CHUNK))
    with running_server(kimi_checkpoint, tmp_path / "server.log", *chunked, *flags) as server:
        assert (input_logprobs(server, tokens) - expected).abs().max() < LOGPROB_TOLERANCE


def test_a_batch_of_prompts_with_a_shared_prefix_agrees_with_transformers(
    server: Server, reference: ReferenceModel
) -> None:
    prefix = prompt(100, seed=1)
    prompts = [prefix + prompt(10 + 30 * i, seed=2 + i) for i in range(6)]
    server.generate(prefix)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda tokens: input_logprobs(server, tokens, start=len(prefix)), prompts))
    for tokens, got in zip(prompts, answers, strict=True):
        expected = expected_logprobs(reference, tokens)[len(prefix) :]
        assert (got - expected).abs().max() < LOGPROB_TOLERANCE


def test_greedy_tokens_agree_with_transformers(server: Server, reference: ReferenceModel) -> None:
    tokens = prompt(3 * CHUNK + 5, seed=20)
    generated = server.generate(tokens, max_new_tokens=12)["output_ids"]
    predicted = reference.logits(tokens + generated).argmax(-1)[len(tokens) - 1 : -1]
    assert generated == predicted.tolist()


def test_no_new_tokens_prefills_and_fills_the_prefix_cache(server: Server) -> None:
    tokens = prompt(2 * CHUNK + 3, seed=30)
    first, second = server.generate(tokens), server.generate(tokens)
    assert first["output_ids"] == second["output_ids"] == []
    assert first["meta_info"]["prompt_tokens"] == len(tokens)
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] == len(tokens) - 1
