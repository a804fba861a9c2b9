"""An image's rows pass only where the engine has the same image for the prompt."""

import numpy as np
import pytest

from sglang_hs_capture.store.hashing import end_hash
from sglang_hs_capture.writing.images import prove_images
from sglang_hs_capture.writing.plan import ImageSpan

PAD = 7
FIRST, SECOND = ImageSpan(1, 5, (10**15, 10**16)), ImageSpan(8, 1, (10**14, 3, 4, 5))
TOKENS = np.array([1, 10**15, 10**16, 10**15, 10**16, 10**15, 2, 3, 10**14, 4], dtype=np.int64)


def test_the_ids_are_those_of_the_images():
    media = prove_images(TOKENS, (FIRST, SECOND), PAD)
    assert media.runs == ((1, 5), (8, 1))
    assert media.token == PAD
    assert media.prompt_hash == end_hash([1, PAD, 2, 3, PAD, 4])


def test_a_prompt_without_images_has_none():
    assert prove_images(TOKENS, (), None) is None


@pytest.mark.parametrize("position", [1, 3, 5])
def test_rows_of_another_image_are_told(position):
    tokens = TOKENS.copy()
    tokens[position] += 1
    assert "rows at positions 1 on were computed from another image" in prove_images(tokens, (FIRST, SECOND), PAD)


def test_an_image_behind_the_prompts_end_is_told():
    assert "an image takes positions 8 on, and the prompt ends after 8 tokens" in prove_images(
        TOKENS[:8], (FIRST, SECOND), PAD
    )


def test_a_model_without_a_placeholder_is_told():
    assert "names no placeholder" in prove_images(TOKENS, (FIRST,), None)
