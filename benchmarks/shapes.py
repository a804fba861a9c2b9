"""Model directories of real layer shapes without weights: only a config.json, for SGLang's ``--load-format dummy``."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A DeepSeek-V3 style language model; every layer has the real sizes, ``experts`` may be fewer to fit one card.

    Attributes:
        w4a16: the routed experts are stored as in Kimi-K2.5's checkpoint: 4-bit integers with a scale for each 32.
    """

    layers: int
    experts: int
    vocab_size: int = 163840
    w4a16: bool = False

    def parameters(self) -> int:
        """How many weights such a model has."""
        c = self.config()
        hidden, heads = c["hidden_size"], c["num_attention_heads"]
        rope, nope, value, rank = c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
        queries = hidden * c["q_lora_rank"] + c["q_lora_rank"] * (1 + heads * (nope + rope))
        keys_and_values = hidden * (rank + rope) + rank * (1 + heads * (nope + value))
        attention = queries + keys_and_values + heads * value * hidden + 2 * hidden  # with the layer's two norms
        expert = 3 * hidden * c["moe_intermediate_size"]
        sparse = (self.experts + c["n_shared_experts"]) * expert + self.experts * hidden
        dense_layers = c["first_k_dense_replace"]
        mlps = dense_layers * 3 * hidden * c["intermediate_size"] + (self.layers - dense_layers) * sparse
        return int(self.layers * attention + mlps + 2 * self.vocab_size * hidden + hidden)

    def weight_bytes(self) -> int:
        """Bytes of the weights: two for each in bfloat16, half a byte and its share of a scale for those of W4A16."""
        c = self.config()
        expert = 3 * c["hidden_size"] * c["moe_intermediate_size"]
        packed = (self.layers - c["first_k_dense_replace"]) * self.experts * expert if self.w4a16 else 0
        return 2 * (self.parameters() - packed) + packed // 2 + 2 * packed // GROUP_SIZE

    def kv_bytes(self) -> int:
        """Bytes of KV cache for each token in bfloat16: the compressed keys and values, and the rotated keys."""
        c = self.config()
        return 2 * self.layers * (int(c["kv_lora_rank"]) + int(c["qk_rope_head_dim"]))

    def config(self) -> dict[str, Any]:
        """The content of config.json: sizes from the public configs of DeepSeek-V3 and Kimi-K2."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_hidden_layers": self.layers,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 2.827,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-06,
            "max_position_embeddings": 131072,
            "rope_theta": 50000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "attention_bias": False,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab_size,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": "bfloat16",
            **({"quantization_config": W4A16} if self.w4a16 else {}),
        }


# Weights of W4A16 that share a scale.
GROUP_SIZE = 32
# As in the config of the public checkpoint: routed experts alone are packed.
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "type": "int",
                "num_bits": 4,
                "group_size": GROUP_SIZE,
                "strategy": "group",
                "symmetric": True,
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    },
}

# Kimi-K2.5's whole language model: 1.03e12 weights, of which 1.01e12 are the routed experts', 594 GB in all.
WHOLE = Shape(layers=61, experts=384, w4a16=True)

SHAPES = {
    # Kimi-K2.5's depth, its first layer dense, with 16 of 384 experts so that it fits one H200, which has 150.7 GB
    # (140.4 GiB). Billions of weights: attention 61 x 0.101 = 6.2, the dense layer 0.4, experts 60 x 17 x 0.044 = 44.9,
    # embeddings and head 2.3; together 53.8, or 107.7 GB in bfloat16. SGLang keeps the two halves of each kv_b_proj a
    # second time: 1.0 GB. The KV cache has 70 kB a token: 9.2 GB for 64 prompts of 2048 tokens. Two device buffers of a
    # chunk of 8192 rows: 0.9 GB. Together 119 GB, which leaves 31 GB for activations and CUDA's own.
    "kimi-k2.5": Shape(layers=61, experts=16),
    # Four times the captured bytes per unit of compute.
    "eight-layers": Shape(layers=8, experts=64),
}


def write_model(directory: Path, shape: Shape, **changes: Any) -> Path:
    """Write ``config.json`` into ``directory`` and return it; ``changes`` replace keys of the config."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**shape.config(), **changes}, indent=2))
    return directory
