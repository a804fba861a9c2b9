"""The arithmetic by which a shape is said to fit a card."""

import json
import re

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.load import text_config
from benchmarks.shapes import SHAPES, WHOLE, Shape, write_model

# Of one H200, and what is left free for activations of a chunk and for CUDA.
CARD_BYTES, FREE_BYTES = 150.7e9, 20e9
IN_FLIGHT, CHUNK_ROWS, STATES = 64 * 2048, 8192, 4


@pytest.mark.parametrize("shape", [*SHAPES.values(), Shape(layers=3, experts=8, vocab_size=1000)])
def test_the_number_of_weights_is_that_of_transformers(tmp_path, shape):
    config = AutoConfig.from_pretrained(write_model(tmp_path, shape))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(weight.numel() for weight in model.parameters()) == shape.parameters()


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_fit_one_card_in_bfloat16(name):
    shape = SHAPES[name]
    hidden = shape.config()["hidden_size"]
    buffers = 2 * CHUNK_ROWS * STATES * hidden * 2
    assert 2 * shape.parameters() + shape.kv_bytes() * IN_FLIGHT + buffers < CARD_BYTES - FREE_BYTES


def test_kimi_has_its_depth_and_width_and_a_dense_first_layer():
    config = SHAPES["kimi-k2.5"].config()
    assert (config["num_hidden_layers"], config["hidden_size"], config["first_k_dense_replace"]) == (61, 7168, 1)


def test_the_language_model_of_a_wrapper_is_found(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1, "text_config": {"vocab_size": 2}}))
    assert text_config(tmp_path)["vocab_size"] == 2
    assert text_config(write_model(tmp_path, SHAPES["kimi-k2.5"]))["vocab_size"] == 163840


def test_the_whole_model_fits_eight_cards_in_four_bits_and_only_there():
    """Attention, shared experts, embeddings and what is not packed are bfloat16; the cards share all of them evenly."""
    packed = WHOLE.weight_bytes()
    assert 590e9 < packed < 600e9
    assert packed / 8 + 40e9 < CARD_BYTES < packed / 4 + 40e9
    assert WHOLE.parameters() == pytest.approx(1.03e12, rel=0.01)
    assert Shape(layers=8, experts=64).weight_bytes() == 2 * Shape(layers=8, experts=64).parameters()


def test_what_is_packed_is_named_as_compressed_tensors_expects(tmp_path):
    config = AutoConfig.from_pretrained(write_model(tmp_path, WHOLE))
    group = QuantizationConfig.model_validate(config.quantization_config).config_groups["group_0"]
    assert (group.weights.num_bits, group.weights.group_size, group.weights.symmetric) == (4, 32, True)
    ignored = [re.compile(name[3:]) for name in config.quantization_config["ignore"] if name.startswith("re:")]

    def is_packed(name: str) -> bool:
        return not any(pattern.match(name) for pattern in ignored)

    assert is_packed("model.layers.1.mlp.experts.0.up_proj")
    for name in ("self_attn.o_proj", "mlp.shared_experts.up_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        assert not is_packed(f"model.layers.1.{name}")
