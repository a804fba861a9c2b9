"""Final states against what the engine itself predicted: ``log_softmax(lm_head(norm(state)))``, computed anew.

The engine's log-probabilities come from the very forward that was captured. So all that lies between them and the
stored states is the norm, the head and rounding, however deep the model is and whatever its experts chose.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sglang_hs_capture.errors import ConfigError, InputError
from sglang_hs_capture.store.known_answers import KnownAnswer
from sglang_hs_capture.verify.lm_head import LmHead

# A sum of products x_j w_j whose factors are rounded has an error of about a unit of rounding times the root of their
# squares' sum, and the engine rounds the sum once more. By the coarser dtype; docs/verify.md has the measurements.
UNITS = {"float32": 2.0**-22, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3": 2.0**-5}
# What float32 sums in another order may always differ by.
ABSOLUTE = 1e-4
# In units of what is allowed for a position: the median of all; what 1 of 100 may exceed, and the median of a sample.
MOST_TYPICAL, MOST_RARE = 1.0, 3.0
LEAST_AGREEMENT = 0.98
# A target that leaves more than an eighth of the vocabulary open has learned nothing of such text.
CHANCE_SHARE = 1 / 8
_COARSENESS = tuple(UNITS)


class Captured(Protocol):
    """What is needed of a dataset; ``HiddenStateDataset`` has it."""

    @property
    def columns(self) -> Sequence[str]: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    def final_norm(self) -> tuple[Tensor, float]: ...


@dataclass(frozen=True)
class Agreement:
    """How far one form of the final state leads to what the engine predicted.

    Attributes:
        column: its name.
        typical: the median difference of the log-probabilities, as a share of what is allowed.
        rare: the 99th percentile of these shares.
        absolute: the median difference itself.
        top: the share of positions with the same likeliest token, or one as likely within what is allowed.
        worst: the id of the sample whose median share is largest; ``worst_share`` is that share.
    """

    column: str
    typical: float
    rare: float
    absolute: float
    top: float
    worst: str
    worst_share: float

    def problem(self) -> str:
        """What is more than is allowed; empty if nothing is."""
        if not self.typical <= MOST_TYPICAL or not self.rare <= MOST_RARE:
            return (
                f"log-probabilities computed from it differ from the engine's by {self.absolute:.3g} (median), "
                f"{self.typical:.3g} times what is allowed, and 1 of 100 by more than {self.rare:.3g} times it; the "
                f"likeliest token agrees at {self.top:.1%} of the positions"
            )
        if not self.worst_share <= MOST_RARE:
            return (
                f"half of this sample's log-probabilities differ from the engine's by {self.worst_share:.3g} times "
                "what is allowed, or more"
            )
        if not self.top >= LEAST_AGREEMENT:
            return f"the likeliest token agrees with the engine's at {self.top:.1%} of the positions only"
        return ""


@dataclass(frozen=True)
class AnswerReport:
    """The outcome over ``prompts`` prompts with ``positions`` predictions in all.

    Attributes:
        unusable: predictions that were not finite in the engine.
        perplexity: of the engine's predictions, over the positions compared; NaN if there are none.
        vocab: number of tokens there are.
    """

    prompts: int
    positions: int
    unusable: int
    perplexity: float
    vocab: int
    computed_in: str
    columns: tuple[Agreement, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**_finite(vars(self)), "columns": [_finite(vars(column)) for column in self.columns]}

    def lines(self) -> list[str]:
        """The same for a person."""
        shown = [
            f"Known answers: {self.prompts:,} prompts, {self.positions:,} of the engine's own predictions, whose "
            f"perplexity is {self.perplexity:,.4g}; allowed is 1 for the median, {MOST_RARE:g} for 99%",
            f"{'state':<16} {'median':>9} {'99%':>9} {'absolute':>10} {'same token':>11}  the worst sample is",
        ]
        shown += [
            f"{column.column:<16} {column.typical:>9.3g} {column.rare:>9.3g} {column.absolute:>10.2e} "
            f"{column.top:>11.1%}  {column.worst!r}, with a median of {column.worst_share:.3g}"
            for column in self.columns
        ]
        return shown

    def problems(self) -> list[tuple[str, str, str]]:
        """Which columns do not lead to the answers: column, the worst sample, and what was found."""
        return [(c.column, c.worst, text) for c in self.columns if (text := c.problem())]

    def poor_target(self) -> str:
        """Why the engine's predictions are those of no language model; empty if they may be."""
        if self.unusable:
            return f"{self.unusable:,} of the engine's {self.positions:,} log-probabilities are NaN or infinite"
        if not self.perplexity <= self.vocab * CHANCE_SHARE:
            return (
                f"the perplexity of the engine's predictions is {self.perplexity:,.4g} with {self.vocab:,} tokens to "
                "choose from: the target has random weights, or it computes garbage"
            )
        return ""


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no number that is not finite."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in values.items()}


@dataclass
class _Rows:
    """What the engine predicted at n positions, and from which states.

    ``states`` has float32 [n, H] by column; ``tokens`` and ``top`` are int64 [n]; ``logprobs`` is float32 [n].
    """

    samples: list[str]
    states: dict[str, Tensor]
    tokens: Tensor
    top: Tensor
    logprobs: Tensor


def check_answers(
    dataset: Captured, known: Sequence[tuple[int, KnownAnswer]], head: LmHead, computed_in: str
) -> AnswerReport:
    """Compute the engine's answers anew from stored states.

    Args:
        dataset: captured samples.
        known: the index of a sample in it, and the engine's answer to it.
        head: of the model they were captured from.
        computed_in: the coarser one of the dtypes that states are stored in and that the engine computed in.

    Raises:
        InputError: there is no answer.
        ConfigError: a token is none of the model's.
        StoreError: the final norm is needed and the dataset has none.
        CorruptionError: a sample cannot be read.
    """
    rows = _gather(dataset, known)
    if not len(rows.tokens):
        raise InputError("known answers: there is none to any sample of the dataset")
    tokens = torch.cat([rows.tokens, rows.top])
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < head.rows:
            raise ConfigError(f"known answers: there is a token {token}, and the model has {head.rows}; see --model")
    usable = rows.logprobs.isfinite()
    agreements = tuple(
        _agreement(name, states, rows, usable, head, computed_in) for name, states in rows.states.items()
    )
    mean = -rows.logprobs[usable].double().mean()
    return AnswerReport(
        prompts=len(known),
        positions=len(rows.tokens),
        unusable=int((~usable).sum()),
        perplexity=float(mean.exp()),
        vocab=head.rows,
        computed_in=computed_in,
        columns=agreements if bool(usable.any()) else (),
    )


def coarser(*dtypes: str) -> str:
    """That one of some dtypes that rounds most."""
    return max(dtypes, key=_COARSENESS.index)


def _gather(dataset: Captured, known: Sequence[tuple[int, KnownAnswer]]) -> _Rows:
    finals = [name for name in dataset.columns if name.startswith("final:")]
    pieces: dict[str, list[Tensor]] = {name: [] for name in finals}
    samples: list[str] = []
    tokens: list[Tensor] = []
    top: list[int] = []
    logprobs: list[float] = []
    for index, answer in known:
        sample = dataset[index]
        here = slice(answer.start, answer.length - 1)
        for name in finals:
            pieces[name].append(sample["hidden_states"][list(dataset.columns).index(name)][here].float())
        tokens.append(sample["input_ids"][answer.start + 1 :])
        top += answer.top
        logprobs += [math.nan if value is None else value for value in answer.logprobs]
        samples += [answer.id] * len(answer.top)
    states = {name: torch.cat(parts) for name, parts in pieces.items() if parts}
    if "final:pre_norm" in states:
        weight, eps = dataset.final_norm()
        x = states["final:pre_norm"]
        states["final:pre_norm"] = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    every = torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64)
    return _Rows(samples, states, every, torch.tensor(top, dtype=torch.int64), torch.tensor(logprobs))


def _agreement(name: str, states: Tensor, rows: _Rows, usable: Tensor, head: LmHead, computed_in: str) -> Agreement:
    found = _predict(states, rows, head)
    allowed = ABSOLUTE + UNITS[computed_in] * found.scale
    difference = (found.logprobs - rows.logprobs).abs()
    # A NaN of ours is no agreement, wherever the engine had a number.
    share = (difference / allowed).nan_to_num(nan=math.inf, posinf=math.inf)[usable]
    medians = {id: _quantile(share[_of(rows, usable, id)], 0.5) for id in dict.fromkeys(rows.samples)}
    medians = {id: value for id, value in medians.items() if value == value}  # noqa: PLR0124
    worst = max(medians, key=lambda id: medians[id], default="")
    as_likely = found.best - found.of_top <= 2 * allowed
    return Agreement(
        column=name,
        typical=_quantile(share, 0.5),
        rare=_quantile(share, 0.99),
        absolute=_quantile(difference.nan_to_num(nan=math.inf)[usable], 0.5),
        top=float(as_likely[usable].float().mean()),
        worst=worst,
        worst_share=medians.get(worst, math.nan),
    )


def _of(rows: _Rows, usable: Tensor, id: str) -> Tensor:
    """bool: which of the usable rows are those of a sample."""
    return torch.tensor([sample == id for sample in rows.samples])[usable]


def _quantile(values: Tensor, share: float) -> float:
    """By the nearest of the values, so that one infinity does not make others NaN; NaN if there are none."""
    return float(values.quantile(share, interpolation="nearest")) if len(values) else math.nan


@dataclass
class _Predicted:
    """What states of n positions lead to; each is float32 [n].

    Attributes:
        logprobs: of the token that follows.
        best: the largest logit; ``of_top`` is that of the token the engine held for the likeliest.
        scale: what the rounding of the log-probability is in proportion to.
    """

    logprobs: Tensor
    best: Tensor
    of_top: Tensor
    scale: Tensor


def _predict(states: Tensor, rows: _Rows, head: LmHead) -> _Predicted:
    """Multiply with the head, a piece of the vocabulary at a time.

    Args:
        states: float32 ``[n, H]``, after the norm.
    """
    total = torch.full((len(states),), -math.inf)
    best, likeliest = total.clone(), torch.zeros_like(rows.tokens)
    for first, weight in head.pieces():
        logits = states @ weight.T
        total = torch.logaddexp(total, logits.logsumexp(dim=-1))
        largest, place = logits.max(dim=-1)
        likeliest = torch.where(largest > best, place + first, likeliest)
        best = torch.maximum(best, largest)
    token, of_token = _logits(states, head, rows.tokens)
    _, of_best = _logits(states, head, likeliest)
    of_top, _ = _logits(states, head, rows.top)
    return _Predicted(token - total, best, of_top, token.abs() + of_token + best.abs() + of_best)


def _logits(states: Tensor, head: LmHead, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [n] twice: the logits of ``tokens`` [n], one a position, and the roots of their terms' squares' sums."""
    terms = states * head.rows_of(tokens)
    return terms.sum(dim=-1), terms.norm(dim=-1)
