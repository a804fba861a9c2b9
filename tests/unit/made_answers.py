"""A head for made datasets, and what an engine with it would say of their samples."""

import json
from pathlib import Path
from typing import Any

import made_dataset as made
import torch
from safetensors.torch import save_file
from torch.nn.functional import rms_norm

from sglang_hs_capture.store.known_answers import KnownAnswer

VOCAB = 2048
EPS = 1e-6
WEIGHT = torch.linspace(0.5, 1.5, made.HIDDEN)


def head_weight() -> torch.Tensor:
    return torch.randn(VOCAB, made.HIDDEN, generator=torch.Generator().manual_seed(5))


def write_model(
    directory: Path, *, name: str = "lm_head.weight", sharded: bool = False, tied: bool = False, **change: Any
) -> Path:
    """A checkpoint with nothing but a head and a weight that has no part in it."""
    directory.mkdir()
    config = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 6, "hidden_size": made.HIDDEN}
    config |= {"vocab_size": VOCAB, "tie_word_embeddings": tied} | change
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(made.HIDDEN)}, directory / "model-00001-of-00002.safetensors")
    save_file({name: head_weight()}, directory / "model-00002-of-00002.safetensors")
    if sharded:
        places = {"model.norm.weight": "model-00001-of-00002.safetensors", name: "model-00002-of-00002.safetensors"}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


def answer_of(id: str, start: int = 0) -> KnownAnswer:
    """What an engine would say of a made sample: by torch's own functions, all at once."""
    number = int(id[1:])
    tokens = made.tokens_of(number, made.LENGTHS[number])
    state = torch.from_numpy(made.states_of(tokens)[:, 2])
    logprobs = (rms_norm(state, [made.HIDDEN], WEIGHT, EPS) @ head_weight().T).log_softmax(-1)
    after = torch.from_numpy(tokens[start + 1 :])
    told = logprobs[start:-1].gather(1, after[:, None])[:, 0].tolist()
    top = tuple(logprobs[start:-1].argmax(-1).tolist())
    return KnownAnswer(id, len(tokens), made.end_hash_of(id), start, tuple(told), top)
