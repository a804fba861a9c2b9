"""Taps on a decoder's own modules: PyTorch's hooks, through which each boundary's state is handed over in the forward.

Every decoder layer of SGLang's takes ``captured_last_layer_outputs``, a collector that it hands the residual stream
entering it, gathered over attention-TP as need be. A pre-hook passes a collector of our own. Gathering is a collective
operation: the taps are armed alike on every rank of a tensor-parallel group, also where nothing is written.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_hs_capture.errors import GuardError
from sglang_hs_capture.layers import Column, Final

Sink = Callable[[int, torch.Tensor], None]


class Collector:
    """Takes one boundary's state from SGLang's layer code and passes it on at once; it never keeps a tensor.

    SGLang 0.5.21 and newer call ``capture``, 0.5.17 to 0.5.20 ``append``. What comes is borrowed: the layer changes it
    in place afterwards, so the sink must have launched its work on it before returning.
    """

    # Read by 0.5.17 to 0.5.20: no clone is needed before ``append``.
    copies_on_append = True

    def __init__(self, sink: Sink, column: int) -> None:
        self._sink, self._column = sink, column

    def capture(self, hidden: torch.Tensor, *, owned: bool = False) -> None:
        """Pass on a state ``[N, H]``."""
        del owned
        self._sink(self._column, hidden)

    def append(self, hidden: torch.Tensor) -> None:
        """Pass on a state ``[N, H]``."""
        self._sink(self._column, hidden)


class Taps:
    """Hooks on one decoder (a ``DeepseekV2Model``), idle until armed with a sink, and after ``disarm``."""

    def __init__(self, decoder: Any, columns: Sequence[Column]) -> None:
        """Register the hooks.

        Args:
            decoder: has ``layers``, a list of decoder layers, and ``norm``, the final norm.
            columns: the states to capture; their order gives each its column number.
        """
        self._sink: Sink | None = None
        for number, column in enumerate(columns):
            if column.boundary is not None:
                hook = self._layer_hook(number, column.boundary)
                layer = decoder.layers[column.boundary]
                layer.register_forward_pre_hook(hook, with_kwargs=True)
        finals = {column.final: number for number, column in enumerate(columns) if column.final is not None}
        if finals:
            decoder.norm.register_forward_hook(self._norm_hook(finals))

    def arm(self, sink: Sink) -> None:
        """From now on every tapped state goes to ``sink(column, state)``."""
        self._sink = sink

    def disarm(self) -> None:
        """Stop passing states on."""
        self._sink = None

    def _layer_hook(self, number: int, boundary: int) -> Callable[..., Any]:
        def pass_collector(_layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            if self._sink is None:
                return None
            if kwargs.get("captured_last_layer_outputs") is not None:
                raise GuardError(
                    f"layer {boundary} already captures its input for SGLang's own use (speculative decoding or "
                    "returned hidden states); start the server without these"
                )
            return args, {**kwargs, "captured_last_layer_outputs": Collector(self._sink, number)}

        return pass_collector

    def _norm_hook(self, finals: dict[Final, int]) -> Callable[..., Any]:
        def take_final(_norm: Any, args: tuple[torch.Tensor, ...], output: Any) -> None:
            if self._sink is None:
                return
            # norm(hidden, residual) returns the sum as its second result; norm(hidden) was given it.
            normed, before = output if isinstance(output, tuple) else (output, args[0])
            if Final.PRE_NORM in finals:
                self._sink(finals[Final.PRE_NORM], before)
            if Final.POST_NORM in finals:
                self._sink(finals[Final.POST_NORM], normed)

        return take_final
