"""Shows a sample with the tokens that are trained on, so that a person can see that the loss mask is right."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.text import Text

from sglang_hs_capture.data.records import Sample
from sglang_hs_capture.text import shown

TRAINED_STYLE = "bold black on green"
# Around what is trained on where there are no colours.
OPEN, CLOSE = "⟦", "⟧"
# Of a longer run so many tokens at each end are shown.
SHOWN_TOKENS = 100

Decode = Callable[[Sequence[int]], str]


def print_samples(console: Console, samples: Sequence[Sample], decode: Decode) -> None:
    """Print samples, each with a heading.

    Args:
        console: where to.
        samples: the samples.
        decode: gives the text of token ids.
    """
    coloured = console.is_terminal and not console.no_color
    if samples:
        mark = Text("so", TRAINED_STYLE) if coloured else f"{OPEN}so{CLOSE}"
        console.print(Text.assemble("Tokens that are trained on are shown ", mark, ".\n"))
    for sample in samples:
        heading = (
            f"{shown(sample.id)} ({sample.source}): {len(sample.input_ids):,} tokens, "
            f"{int(sample.loss_mask.sum()):,} trained on"
        )
        console.print(Text(visible(heading), "bold"), soft_wrap=True)
        console.print(highlighted(sample, decode, coloured=coloured), soft_wrap=True)
        console.print()


def highlighted(sample: Sample, decode: Decode, *, coloured: bool) -> Text:
    """The text of a sample, with what is trained on in a colour, or between brackets."""
    text = Text()
    edges = [0, *(np.flatnonzero(np.diff(sample.loss_mask)) + 1).tolist(), len(sample.input_ids)]
    for start, end in pairwise(edges):
        run = visible(_run(sample.input_ids[start:end].tolist(), decode))
        trained = bool(sample.loss_mask[start])
        text.append(
            f"{OPEN}{run}{CLOSE}" if trained and not coloured else run, TRAINED_STYLE if trained and coloured else None
        )
    return text


def visible(text: str) -> str:
    """Text without what would move a terminal's cursor or change its state; line ends stay."""
    return "".join(
        character if character == "\n" or character.isprintable() else _escaped(character) for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _run(tokens: list[int], decode: Decode) -> str:
    if len(tokens) <= 2 * SHOWN_TOKENS:
        return decode(tokens)
    left = len(tokens) - 2 * SHOWN_TOKENS
    return f"{decode(tokens[:SHOWN_TOKENS])} [... {left:,} tokens ...] {decode(tokens[-SHOWN_TOKENS:])}"
