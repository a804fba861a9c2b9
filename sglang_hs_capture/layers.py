"""The layer convention, and every conversion to somebody else's.

The unit is the *boundary* ``b`` in ``[0, num_layers]``: the residual stream entering decoder layer ``b``, which is the
output of layer ``b - 1`` and, in ``transformers``, ``hidden_states[b]``. Boundary ``num_layers`` is the last layer's
output before the final norm; it is captured as the *final state* and never listed among the boundaries. No other module
adds to or subtracts from a layer id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sglang_hs_capture.errors import ConfigError

CONVENTION = "boundary"
PRESETS = ("eagle3", "sglang")


class Final(StrEnum):
    """Which form of the last layer's output is stored."""

    PRE_NORM = "pre_norm"
    POST_NORM = "post_norm"
    BOTH = "both"


@dataclass(frozen=True)
class Column:
    """One captured state of a row.

    ``boundary`` is set for a state between two layers, ``final`` for the last layer's output; exactly one of them is.
    """

    boundary: int | None = None
    final: Final | None = None

    @property
    def name(self) -> str:
        """The state's name on disk: ``boundary:31`` or ``final:pre_norm``."""
        return f"boundary:{self.boundary}" if self.final is None else f"final:{self.final.value}"


def parse_layers(text: str) -> str | list[int]:
    """Read the command line's ``--layers``: a preset's name, or boundaries separated by commas.

    Raises:
        ConfigError: the text is neither.
    """
    if text in PRESETS:
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--layers: expected one of {', '.join(PRESETS)} or boundaries separated by commas such as 3,31,59; "
            f"got {text!r}"
        ) from None


def resolve_boundaries(layers: str | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Turn a preset or an explicit list into the boundaries to capture, in ascending order.

    ``eagle3`` captures the outputs of layers 2, L//2 and L-3 (``[3, 31, 59]`` for 61 layers); ``sglang`` the boundaries
    that SGLang's EAGLE-3 serving reads when a draft model's config names none (``[2, L//2, L-3]``).

    Args:
        layers: ``"eagle3"``, ``"sglang"`` or boundaries.
        num_layers: number of decoder layers of the model.

    Raises:
        ConfigError: a boundary lies outside ``[0, num_layers - 1]``, is repeated or out of order, or none is given.
    """
    if isinstance(layers, str):
        middle = num_layers // 2
        presets = {"eagle3": (3, middle + 1, num_layers - 2), "sglang": (2, middle, num_layers - 3)}
        if layers not in presets:
            raise ConfigError(f"layers: expected one of {', '.join(PRESETS)} or a list of boundaries; got {layers!r}")
        boundaries: tuple[int, ...] = presets[layers]
        origin = f"the preset {layers!r}"
    else:
        boundaries = tuple(layers)
        origin = "the list"
    problem = _problem(boundaries, num_layers)
    if problem:
        raise ConfigError(
            f"layers: {origin} gives the boundaries {list(boundaries)} for a model of {num_layers} layers, but "
            f"{problem}; name boundaries in ascending order, each from 0 to {num_layers - 1} (the final layer's output "
            "is captured besides)"
        )
    return boundaries


def _problem(boundaries: tuple[int, ...], num_layers: int) -> str:
    if not boundaries:
        return "at least one is needed"
    outside = [b for b in boundaries if not 0 <= b < num_layers]
    if outside:
        return f"{outside} lies outside the model"
    if len(set(boundaries)) != len(boundaries):
        return "one is repeated"
    if list(boundaries) != sorted(boundaries):
        return "they are out of order"
    return ""


def make_columns(boundaries: Sequence[int], final: Final) -> tuple[Column, ...]:
    """Name the states of a row in the order in which they are stored."""
    finals = (Final.PRE_NORM, Final.POST_NORM) if final is Final.BOTH else (final,)
    return (*(Column(boundary=b) for b in boundaries), *(Column(final=f) for f in finals))


def stage_columns(columns: Sequence[Column], layers: range, num_layers: int) -> tuple[Column, ...]:
    """Those of ``columns`` that a pipeline stage with these decoder layers can capture, in the same order.

    A boundary belongs to the stage whose layer it enters, the final state to the stage that has the last layer.
    """
    last = layers.stop == num_layers
    return tuple(c for c in columns if (last if c.boundary is None else c.boundary in layers))


def output_of_layer_ids(boundaries: Sequence[int]) -> list[int]:
    """The same states in the convention "output of layer i" (SpecForge, ModelOpt, speculators to 0.4).

    Raises:
        ConfigError: boundary 0, the embeddings, is the output of no layer.
    """
    if 0 in boundaries:
        raise ConfigError(
            "boundary 0 holds the embeddings, which are the output of no layer: this convention cannot name it"
        )
    return [b - 1 for b in boundaries]


def sglang_draft_ids(boundaries: Sequence[int]) -> list[int]:
    """The ids for ``eagle_config.eagle_aux_hidden_state_layer_ids`` in a draft model served by SGLang 0.5.17 to 0.5.23.

    SGLang's DeepSeek and Kimi classes take the ids as boundaries, except that a list starting with 1 has 1 added to
    every id: the list for boundaries starting with 2 can be written in both ways, and one starting with 1 in none.

    Raises:
        ConfigError: the first boundary is 1, which SGLang's serving cannot express.
    """
    if boundaries and boundaries[0] == 1:
        raise ConfigError(
            "boundary 1 as the first one cannot be served by SGLang: it adds 1 to every id of a list that starts with 1"
        )
    return list(boundaries)


def layer_ids_of(convention: str, boundaries: Sequence[int]) -> list[int]:
    """States' ids in a convention, ``boundary`` or ``output_of_layer``; the final state is boundary ``num_layers``.

    Raises:
        ConfigError: the convention cannot name one of them.
    """
    return output_of_layer_ids(boundaries) if convention == "output_of_layer" else list(boundaries)


def draft_ids(boundaries: Sequence[int]) -> dict[str, list[int]]:
    """The captured boundaries as each convention writes them; a convention that cannot name them is left out."""
    named = {"boundary": list(boundaries)}
    for name, convert in (("sglang", sglang_draft_ids), ("output_of_layer", output_of_layer_ids)):
        try:
            named[name] = convert(boundaries)
        except ConfigError:
            continue
    return named
