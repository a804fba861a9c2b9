"""Tiny checkpoints with seeded random weights: Kimi-K2.5 and DeepSeek-V3 in all but size.

The weights are scaled so that the model is a fair test of whoever reads its hidden states. Neighbouring boundaries
differ by a large part of their norm, the final norm's weight is far from constant, attention looks at few tokens, and
expert routing has no near ties: the first ``n_routed_experts`` components of a token's embedding hold a permutation of
evenly spaced levels, no layer writes to them, and each router reads nothing else. So two implementations, or two
precisions, choose the same experts, and what remains between them is rounding.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_hs_capture.demo.tokenizer import BOS, EOS, MEDIA_PLACEHOLDER, PAD, demo_texts, train_tokenizer
from sglang_hs_capture.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LEVEL_SPACING = 0.5
VOCAB_MULTIPLE = 64
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, kw_only=True)
class TextShape:
    """Sizes of the language model, under the names that its config.json has for them."""

    num_hidden_layers: int = 8
    hidden_size: int = 192
    num_attention_heads: int = 4
    q_lora_rank: int | None = 48
    kv_lora_rank: int = 32
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 16
    v_head_dim: int = 16
    intermediate_size: int = 256
    moe_intermediate_size: int = 64
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    max_position_embeddings: int = 16384


@dataclass(frozen=True, kw_only=True)
class VisionShape:
    """Sizes of the vision tower, which no text prompt runs through."""

    hidden_size: int = 32
    num_hidden_layers: int = 1
    num_attention_heads: int = 2
    intermediate_size: int = 64
    patch_size: int = 14
    init_pos_emb_height: int = 4
    init_pos_emb_width: int = 4
    merge_kernel_size: tuple[int, int] = (2, 2)


def make_deepseek_v3(path: str | Path, *, seed: int = 0, dtype: str = "float32", **sizes: Any) -> Path:
    """Write a ``DeepseekV3ForCausalLM`` checkpoint with its tokenizer.

    Args:
        path: the directory to create.
        seed: of every weight.
        dtype: ``float32`` or ``bfloat16``.
        sizes: fields of ``TextShape``.

    Returns:
        ``path``.

    Raises:
        ConfigError: the sizes do not fit together, or the dtype is not offered.
    """
    return _make(path, None, seed, dtype, sizes)


def make_kimi_k25(path: str | Path, *, seed: int = 0, dtype: str = "float32", **sizes: Any) -> Path:
    """Write a ``KimiK25ForConditionalGeneration`` checkpoint: a vision tower around the same language model.

    Arguments, result and errors are those of ``make_deepseek_v3``.
    """
    return _make(path, VisionShape(), seed, dtype, sizes)


def _make(path: str | Path, vision: VisionShape | None, seed: int, dtype: str, sizes: dict[str, Any]) -> Path:
    """Write the language model's checkpoint, inside Kimi-K2.5's where there is a vision tower."""
    shape = _text_shape(sizes)
    directory, vocab_size, ids = _prepare(path, dtype)
    config = _text_config(shape, vocab_size, ids, dtype) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3" if vision is None else "kimi_k2",
    }
    weights = dict(_text_weights(shape, vocab_size, seed, "" if vision is None else "language_model."))
    if vision is not None:
        config = _kimi_config(config, _vision_config(vision, shape), ids[MEDIA_PLACEHOLDER])
        weights.update(_vision_weights(vision, shape, seed))
    _write(directory, config, weights, dtype)
    return directory


def _text_shape(sizes: dict[str, Any]) -> TextShape:
    try:
        shape = TextShape(**sizes)
    except TypeError as error:
        raise ConfigError(f"tiny checkpoint: {error}; the sizes are {', '.join(asdict(TextShape()))}") from None
    if shape.hidden_size <= 2 * shape.n_routed_experts:
        raise ConfigError(
            f"tiny checkpoint: hidden_size must be over twice n_routed_experts, since {shape.n_routed_experts} of its "
            f"components hold the routing code; got hidden_size {shape.hidden_size}"
        )
    return shape


def _prepare(path: str | Path, dtype: str) -> tuple[Path, int, dict[str, int]]:
    """Create the directory with the tokenizer in it; returns also the padded vocabulary size and the token ids."""
    if dtype not in DTYPES:
        raise ConfigError(f"tiny checkpoint: expected a dtype of {', '.join(DTYPES)}; got {dtype!r}")
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(demo_texts())
    tokenizer.save_pretrained(directory)
    vocab_size = math.ceil(len(tokenizer) / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return directory, vocab_size, tokenizer.get_vocab()


def _text_config(shape: TextShape, vocab_size: int, ids: dict[str, int], dtype: str) -> dict[str, Any]:
    return asdict(shape) | {
        "vocab_size": vocab_size,
        "num_key_value_heads": shape.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,  # as in Kimi-K2: groups are ranked by sums of scores, which could tie
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": shape.max_position_embeddings // 4,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[PAD],
        "use_cache": True,
        "dtype": dtype,
    }


def _kimi_config(text_config: dict[str, Any], vision_config: dict[str, Any], placeholder: int) -> dict[str, Any]:
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text_config,
        "vision_config": vision_config,
        "dtype": text_config["dtype"],
        "tie_word_embeddings": False,
        "media_placeholder_token_id": placeholder,
        **{key: text_config[key] for key in SPECIAL_IDS},
    }


def _vision_config(vision: VisionShape, shape: TextShape) -> dict[str, Any]:
    """The published checkpoints name the tower's sizes ``vt_*``; SGLang's tower reads them without the prefix too."""
    sizes = asdict(vision)
    prefixed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return (
        sizes
        | {f"vt_{name}": sizes[name] for name in prefixed}
        | {
            "init_pos_emb_time": 4,
            "pos_emb_type": "divided_fixed",
            "video_attn_type": "spatial_temporal",
            "merge_type": "sd2_tpool",
            "mm_projector_type": "patchmerger",
            "mm_hidden_size": vision.hidden_size,
            "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-5,
            "text_hidden_size": shape.hidden_size,
        }
    )


class _Sampler:
    """Draws weights from one seeded generator, in float32."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def linear(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        """``[rows, columns]``, turning inputs of unit variance into outputs of variance ``gain ** 2``."""
        return torch.randn(rows, columns, generator=self.generator) * (gain / math.sqrt(columns))

    def norm(self, size: int) -> torch.Tensor:
        """``[size]``, uniform in [0.5, 1.5]."""
        return 0.5 + torch.rand(size, generator=self.generator)

    def permutation(self, size: int) -> torch.Tensor:
        return torch.randperm(size, generator=self.generator)


def _text_weights(shape: TextShape, vocab_size: int, seed: int, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and float32 value of every weight of the language model."""
    sampler = _Sampler(seed)
    code = shape.n_routed_experts
    levels = (torch.arange(code, dtype=torch.float32) - (code - 1) / 2) * LEVEL_SPACING
    embeddings = torch.randn(vocab_size, shape.hidden_size, generator=sampler.generator)
    embeddings[:, :code] = torch.stack([levels[sampler.permutation(code)] for _ in range(vocab_size)])
    yield f"{prefix}model.embed_tokens.weight", embeddings
    for layer in range(shape.num_hidden_layers):
        for name, weight in _layer_weights(shape, sampler, layer):
            yield f"{prefix}model.layers.{layer}.{name}", weight
    yield f"{prefix}model.norm.weight", sampler.norm(shape.hidden_size)
    yield f"{prefix}lm_head.weight", sampler.linear(vocab_size, shape.hidden_size, gain=3.0)


def _layer_weights(shape: TextShape, sampler: _Sampler, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, code = shape.hidden_size, shape.n_routed_experts
    post_norm = sampler.norm(hidden)
    post_norm[:code] = 1.0  # keeps the levels of the routing code evenly spaced
    yield "input_layernorm.weight", sampler.norm(hidden)
    yield "post_attention_layernorm.weight", post_norm
    for name, weight in _attention_weights(shape, sampler):
        yield f"self_attn.{name}", weight
    if layer < shape.first_k_dense_replace:
        yield from _mlp_weights(shape, sampler, "mlp.", shape.intermediate_size)
        return
    router = torch.zeros(code, hidden)
    router[torch.arange(code), sampler.permutation(code)] = 1.0
    yield "mlp.gate.weight", router
    yield "mlp.gate.e_score_correction_bias", torch.zeros(code)
    for expert in range(code):
        yield from _mlp_weights(shape, sampler, f"mlp.experts.{expert}.", shape.moe_intermediate_size)
    shared = shape.moe_intermediate_size * shape.n_shared_experts
    yield from _mlp_weights(shape, sampler, "mlp.shared_experts.", shared)


def _attention_weights(shape: TextShape, sampler: _Sampler) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    queries = heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    # The gain of 2 makes attention look at few tokens instead of averaging over all.
    if shape.q_lora_rank is None:
        yield "q_proj.weight", sampler.linear(queries, hidden, gain=2.0)
    else:
        yield "q_a_proj.weight", sampler.linear(shape.q_lora_rank, hidden)
        yield "q_a_layernorm.weight", sampler.norm(shape.q_lora_rank)
        yield "q_b_proj.weight", sampler.linear(queries, shape.q_lora_rank, gain=2.0)
    yield "kv_a_proj_with_mqa.weight", sampler.linear(shape.kv_lora_rank + shape.qk_rope_head_dim, hidden)
    yield "kv_a_layernorm.weight", sampler.norm(shape.kv_lora_rank)
    keys_values = heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    yield "kv_b_proj.weight", sampler.linear(keys_values, shape.kv_lora_rank)
    yield "o_proj.weight", _residual_writer(shape, sampler, heads * shape.v_head_dim)


def _mlp_weights(shape: TextShape, sampler: _Sampler, prefix: str, inner: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{prefix}gate_proj.weight", sampler.linear(inner, shape.hidden_size)
    yield f"{prefix}up_proj.weight", sampler.linear(inner, shape.hidden_size)
    yield f"{prefix}down_proj.weight", _residual_writer(shape, sampler, inner)


def _residual_writer(shape: TextShape, sampler: _Sampler, inner: int) -> torch.Tensor:
    """``[hidden_size, inner]``: leaves the components of the routing code alone."""
    weight = sampler.linear(shape.hidden_size, inner, gain=0.7)
    weight[: shape.n_routed_experts] = 0.0
    return weight


def _vision_weights(vision: VisionShape, shape: TextShape, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and float32 value of every weight of the vision tower and its projector."""
    sampler = _Sampler(seed + 1)
    width, inner, merged = (
        vision.hidden_size,
        vision.intermediate_size,
        vision.hidden_size * math.prod(vision.merge_kernel_size),
    )

    def affine(name: str, rows: int, columns: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{name}.weight", sampler.linear(rows, columns)
        yield f"{name}.bias", torch.zeros(rows)

    def norm(name: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{name}.weight", torch.ones(width)
        yield f"{name}.bias", torch.zeros(width)

    embed = "vision_tower.patch_embed"
    pixels = 3 * vision.patch_size**2
    yield f"{embed}.proj.weight", sampler.linear(width, pixels).view(width, 3, vision.patch_size, vision.patch_size)
    yield f"{embed}.proj.bias", torch.zeros(width)
    grid = vision.init_pos_emb_height * vision.init_pos_emb_width
    positions = sampler.linear(grid, width).view(vision.init_pos_emb_height, vision.init_pos_emb_width, width)
    yield f"{embed}.pos_emb.weight", positions
    for block in range(vision.num_hidden_layers):
        name = f"vision_tower.encoder.blocks.{block}"
        yield from norm(f"{name}.norm0")
        yield from norm(f"{name}.norm1")
        yield from affine(f"{name}.wqkv", 3 * width, width)
        yield from affine(f"{name}.wo", width, width)
        yield from affine(f"{name}.mlp.fc0", inner, width)
        yield from affine(f"{name}.mlp.fc1", width, inner)
    yield from norm("vision_tower.encoder.final_layernorm")
    yield from norm("mm_projector.pre_norm")
    yield from affine("mm_projector.proj.0", merged, merged)
    yield from affine("mm_projector.proj.2", shape.hidden_size, merged)


def _write(directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], dtype: str) -> None:
    # The router's bias is float32 in the published checkpoints of every precision.
    tensors = {
        name: weight if name.endswith("e_score_correction_bias") else weight.to(DTYPES[dtype])
        for name, weight in weights.items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    ids = {key: config[key] for key in SPECIAL_IDS}
    for name, content in (("config.json", config), ("generation_config.json", ids)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
