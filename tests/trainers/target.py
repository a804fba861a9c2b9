"""A target model that has learnt something: a small DeepSeek-V3, trained on a language of words.

The states of a model with random weights say nothing about the next token that a draft model could learn in 50 steps.
The language is a chain of words, each of a few tokens; most often the same word follows a word. So nearly every token
is certain for who knows the words and what came before.
"""

import json
import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sglang_hs_capture.demo.checkpoint import make_deepseek_v3

SIZES = {
    "num_hidden_layers": 8,
    "hidden_size": 128,
    "q_lora_rank": 32,
    "n_routed_experts": 4,
    "max_position_embeddings": 2048,
}
STEPS, BATCH, LENGTH, LEARNING_RATE = 240, 16, 96, 2e-3
FIRST_TOKEN, TOKENS, WORDS = 100, 48, 64
FOLLOWS = 0.9
# By how much more each layer adds to the residual stream than the one before it, when the training begins.
GROWTH = 2.0
# How unlike the elements of the final norm's weight are: the standard deviation of their logarithm.
NORM_SPREAD = 1.0


class Language:
    """The words, and which word follows which; the same for every seed of what is said."""

    def __init__(self) -> None:
        rng = random.Random(0)
        letters = range(FIRST_TOKEN, FIRST_TOKEN + TOKENS)
        self._words = [rng.choices(letters, k=rng.randint(3, 6)) for _ in range(WORDS)]
        self._next = rng.sample(range(WORDS), WORDS)

    def sample(self, rng: random.Random, length: int) -> list[int]:
        """``length`` token ids that begin with a word."""
        tokens: list[int] = []
        word = rng.randrange(WORDS)
        while len(tokens) < length:
            tokens += self._words[word]
            word = self._next[word] if rng.random() < FOLLOWS else rng.randrange(WORDS)
        return tokens[:length]


def write_conversations(path: Path, count: int, seed: int) -> None:
    """Write ``count`` tokenised samples of 60 to 120 tokens; the loss is on all but the first 16."""
    language, rng = Language(), random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            tokens = language.sample(rng, rng.randint(60, 120))
            mask = [0] * 16 + [1] * (len(tokens) - 16)
            file.write(json.dumps({"id": f"sample-{number}", "input_ids": tokens, "loss_mask": mask}) + "\n")


def make_target(path: Path, dtype: str, trained: dict[str, torch.Tensor]) -> Path:
    """Write the trained model as a checkpoint in ``dtype``, with the index file that SpecForge wants."""
    make_deepseek_v3(path, dtype=dtype, **SIZES)
    untrained = load_file(path / "model.safetensors")
    tensors = {name: trained[name].to(old.dtype) for name, old in untrained.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def train_target(work: Path) -> dict[str, torch.Tensor]:
    """Train the model, about a minute of one processor.

    Args:
        work: a directory for the checkpoints before and after.

    Returns:
        The weights in float32, by their names in the checkpoint.
    """
    from transformers import AutoModelForCausalLM

    start = make_deepseek_v3(work / "untrained", **SIZES)
    _let_layers_grow(start / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).train()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _train(model)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(work / "trained")
    return _spread_norm(load_file(work / "trained" / "model.safetensors"))


def _let_layers_grow(file: Path) -> None:
    """Let each layer add as much to the residual stream as all before it, so that neighbouring boundaries are unlike.

    In a model of few layers that is trained for so short a time they would be nearly the same to a draft model.
    """
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            layer = int(name.split(".")[2])
            weights[name] = weight * GROWTH ** (layer + 1)
    save_file(weights, file, metadata={"format": "pt"})


def _train(model: torch.nn.Module) -> None:
    language, rng = Language(), random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    for _ in range(STEPS):
        tokens = torch.tensor([language.sample(rng, LENGTH) for _ in range(BATCH)])
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def _spread_norm(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Scale the final norm's weight element by element and lm_head's columns back: the same function.

    The weight of a norm hardly moves from where it began in so short a training. In models that are used its elements
    are not alike, and it is by them that the states before the norm and after it tell apart.
    """
    norm, head = weights["model.norm.weight"], weights["lm_head.weight"]
    scale = torch.exp(NORM_SPREAD * torch.randn(norm.shape, generator=torch.Generator().manual_seed(1)))
    return weights | {"model.norm.weight": norm * scale, "lm_head.weight": head / scale}
