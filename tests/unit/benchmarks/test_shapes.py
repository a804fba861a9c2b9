"""The arithmetic by which a shape is said to fit a card."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.load import text_config
from benchmarks.shapes import SHAPES, Shape, write_model

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
