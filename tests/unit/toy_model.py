"""A toy decoder behind the real capture: real taps, real ring, a real writing process; only SGLang's part is played."""

import os
import signal
import socket
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from sglang_hs_capture import compat
from sglang_hs_capture.capture.session import WritingCapture
from sglang_hs_capture.capture.taps import Taps
from sglang_hs_capture.config import CaptureConfig
from sglang_hs_capture.layers import Final, make_columns
from sglang_hs_capture.staging.ring import Span
from sglang_hs_capture.store.schema import DatasetInfo
from sglang_hs_capture.store.session import SessionRecord
from sglang_hs_capture.writing.messages import PieceNotice

HIDDEN, LAYERS = 16, 3


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, hidden: torch.Tensor, captured_last_layer_outputs: Any = None) -> torch.Tensor:
        if captured_last_layer_outputs is not None:
            captured_last_layer_outputs.capture(hidden, owned=False)
        hidden += self.index + 1
        return hidden


class Norm(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, HIDDEN + 1).to(dtype))

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = hidden + residual
        return total * self.weight, total


class Decoder(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index) for index in range(LAYERS))
        self.norm = Norm(dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        out: torch.Tensor = self.norm(hidden / 2, hidden / 2)[0]
        return out


def info(**changes: Any) -> DatasetInfo:
    values: dict[str, Any] = {
        "boundaries": (1,),
        "columns": ("boundary:1", "final:pre_norm"),
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "dtype": "float32",
        "model_path": "m",
        "architecture": "A",
        "config_hash": "c",
        "final_norm_eps": 1e-6,
        "created_at": "2025-01-01T00:00:00Z",
        "sglang_version": "0",
    }
    return DatasetInfo(**values | changes)


class ToyModel:
    """Serves prompts one forward after the other; the states of a token depend on the token and on its place."""

    def __init__(
        self,
        directory: Path,
        *,
        dtype: str = "float32",
        norm_dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        **settings: Any,
    ) -> None:
        defaults = {"ring_bytes": 2**20, "shard_bytes": 2**16, "min_free_bytes": 0, "commit_interval_s": 0.02}
        config = CaptureConfig(output_dir=str(directory), layers=(1,), dtype=dtype, **defaults | settings)
        self.device = torch.device(device)
        self.decoder = Decoder(norm_dtype).to(self.device)
        columns = make_columns((1,), Final.PRE_NORM)
        taps = Taps(self.decoder, columns)
        session = SessionRecord("dp0-pp0", "5e55" * 8, os.getpid(), socket.gethostname())
        self.capture = WritingCapture(
            taps,
            config,
            info(dtype=dtype),
            columns,
            session=session,
            served_name="toy",
            device=self.device,
            staging_rows=64,
            norm=self.decoder.norm,
        )
        self.table = torch.zeros(64, 4096, dtype=torch.int32, device=self.device)
        self.next_slot = 1
        self.lines: dict[str, int] = {}

    @staticmethod
    def states(prompt: list[int]) -> torch.Tensor:
        """Float32 ``[S, C, H]``, what capture must store; but for the rounding of another dtype."""
        entering = ToyModel.hidden(prompt, 0, len(prompt))
        return torch.stack([entering + 1, entering + 6], dim=1)

    @staticmethod
    def hidden(prompt: list[int], start: int, end: int) -> torch.Tensor:
        ids = torch.tensor(prompt[start:end], dtype=torch.float32).view(-1, 1)
        places = torch.arange(start, end, dtype=torch.float32).view(-1, 1)
        return ids + places / 1024 + torch.arange(HIDDEN) * 16384.0

    def forward(self, *parts: tuple[str, list[int], int, int]) -> torch.Tensor:
        """Run one prefill forward of ``(rid, prompt, start, end)`` parts."""
        return self.run(*self.prepare(*parts))

    def prepare(self, *parts: tuple[str, list[int], int, int]) -> tuple[torch.Tensor, SimpleNamespace]:
        """The decoder's input and the batch of one forward, on the device."""
        lines = [self.lines.setdefault(rid, len(self.lines) % 64) for rid, *_ in parts]
        slots = []
        for line, (_, _, start, end) in zip(lines, parts, strict=True):
            fresh = torch.arange(self.next_slot, self.next_slot + end - start)
            self.table[line, start:end] = fresh
            slots.append(fresh)
            self.next_slot += end - start
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name="EXTEND"),
            rids=[part[0] for part in parts],
            extend_prefix_lens_cpu=[part[2] for part in parts],
            extend_seq_lens_cpu=[part[3] - part[2] for part in parts],
            input_ids=torch.tensor(list(chain.from_iterable(p[s:e] for _, p, s, e in parts))).to(self.device),
            out_cache_loc=torch.cat(slots).to(self.device),
            orig_seq_lens=torch.tensor([len(part[1]) for part in parts]).to(self.device),
            req_pool_indices=torch.tensor(lines).to(self.device),
        )
        return torch.cat([self.hidden(p, s, e) for _, p, s, e in parts]).to(self.device), batch

    def run(self, hidden: torch.Tensor, batch: SimpleNamespace) -> torch.Tensor:
        """One forward."""
        compat.req_to_token = lambda: self.table  # outside a server there is no pool to ask
        with self.capture.forward(batch):
            out: torch.Tensor = self.decoder(hidden)
        return out

    def close(self) -> None:
        self.capture.close()


if __name__ == "__main__":
    # Captures two prompts, announces many pieces that never come, then ends as SIGKILL ends a process.
    model = ToyModel(Path(sys.argv[1]))
    for number in range(1, 3):
        model.forward((f"hs-{number}", [number, 2, 3], 0, 3))
    for number in range(100, 130):
        model.capture._writer.send(PieceNotice("rows", number, Span(0, 4096, 0)))
    os.kill(os.getpid(), signal.SIGKILL)
