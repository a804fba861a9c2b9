"""Faults struck at the writers and readers of other tools, as their packages have them, on this machine's CPU.

    python -m pip install --no-deps --target build/others specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0
    python -m tests.faults.others --packages build/others

Nothing of theirs is changed. What runs only inside their GPU servers, such as vLLM's connector, is not tried.
"""

import argparse
import os
import pickle
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

TOKENS, LAYERS, HIDDEN = 64, 4, 256
FAST = "/dev/shm"


def states(seed: int) -> torch.Tensor:
    """bfloat16 [S, K, H]."""
    return torch.randn(TOKENS, LAYERS, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def flip_in(path: Path, pattern: bytes, choose: random.Random) -> None:
    """Flip a bit of a file's tensor data, which contains the pattern."""
    data = bytearray(path.read_bytes())
    begin = data.index(pattern[:64])
    data[begin + choose.randrange(len(pattern))] ^= 1 << choose.randrange(8)
    path.write_bytes(data)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class SpecForge:
    """SpecForge 0.2.0: ``runtime/data_plane``."""

    def __init__(self) -> None:
        from specforge.runtime.data_plane import disaggregated, feature_store, offline_reader

        self.store, self.features, self.reader = disaggregated, feature_store, offline_reader

    def sample(self, seed: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(TOKENS)
        return {"input_ids": ids, "loss_mask": ids, "aux_hidden_state": states(seed), "hidden_state": states(-seed)}

    def put(self, folder: Path, name: str, seed: int) -> Path:
        """One sample by ``SharedDirFeatureStore.put``; its file."""
        self.store.SharedDirFeatureStore(str(folder), "s").put(self.sample(seed), sample_id=name, metadata={})
        (path,) = (folder / "s").glob(f"{name}.g*.ckpt")
        return path

    def killed(self, folder: Path, seed: int) -> bool:
        """Whether a SIGKILL in ``SharedDirFeatureStore.put`` leaves a file under its final name that cannot be read."""
        # Of a size that takes a moment to write; computed here, since torch's threads are not there after a fork.
        sample = {**self.sample(seed), "hidden_state": torch.ones(512, LAYERS, 7168).bfloat16()}
        store = self.store.SharedDirFeatureStore(str(folder), "s")
        child = os.fork()
        if child == 0:
            for number in range(10**6):
                store.put(sample, sample_id=f"p{number % 8}", metadata={})
        while not any((folder / "s").glob("*.ckpt")):
            time.sleep(0.005)
        time.sleep(random.Random(seed).random() * 0.1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return not all(self._readable(path) for path in (folder / "s").glob("*.ckpt"))

    def leftover(self, folder: Path, seed: int) -> bool:
        """Whether the same leaves a temporary file that a store opened later keeps."""
        self.killed(folder, seed)
        self.put(folder, "next", seed)
        return any((folder / "s").glob("*.tmp"))

    def _readable(self, path: Path) -> bool:
        try:
            self.features.load_feature_file(str(path))
        except Exception:
            return False
        return True

    def half_counts(self, folder: Path, seed: int) -> bool:
        """Whether a file cut at a random byte is a sample for ``OfflineManifestReader`` as it is by default."""
        path = self.put(folder, "cut", seed)
        os.truncate(path, random.Random(seed).randrange(1, path.stat().st_size))
        return len(list(self.reader.OfflineManifestReader(str(folder)).read())) == 1

    def half_counts_validated(self, folder: Path, seed: int) -> bool:
        """The same with ``validate_files``."""
        path = self.put(folder, "cut", seed)
        os.truncate(path, random.Random(seed).randrange(1, path.stat().st_size))
        try:
            return len(list(self.reader.OfflineManifestReader(str(folder), validate_files=True).read())) == 1
        except Exception:
            return False

    def nan_accepted(self, folder: Path, seed: int) -> bool:
        """Whether a NaN is stored, and given back, without a word."""
        sample = self.sample(seed)
        sample["hidden_state"][3, 1, 5] = float("nan")
        store = self.store.SharedDirFeatureStore(str(folder), "s")
        found, _ = store.get(store.put(sample, sample_id="n", metadata={}))
        return bool(found["hidden_state"].isnan().any())

    def zeros_accepted(self, folder: Path, seed: int) -> bool:
        """Whether states of nothing but zeros are."""
        sample = {**self.sample(seed), "hidden_state": torch.zeros(TOKENS, LAYERS, HIDDEN)}
        store = self.store.SharedDirFeatureStore(str(folder), "s")
        found, _ = store.get(store.put(sample, sample_id="z", metadata={}))
        return not found["hidden_state"].any()

    def flip_accepted(self, folder: Path, seed: int) -> bool:
        """Whether a flipped bit in a file's states is given back without a word."""
        path = self.put(folder, "flip", seed)
        flip_in(path, bytes_of(states(-seed)), random.Random(seed))
        try:
            return not torch.equal(self.features.load_feature_file(str(path))["hidden_state"], states(-seed))
        except Exception:
            return False

    def code_runs(self, folder: Path, seed: int) -> bool:
        """Whether a file of features can run code of its own."""
        mark, path = folder / "ran", folder / "x.ckpt"
        path.write_bytes(pickle.dumps(_Runs(str(mark)), protocol=2))
        try:
            self.features.load_feature_file(str(path))
        except Exception:
            torch.save({"x": _Runs(str(mark))}, path)
            self.features.load_feature_file(str(path))
        return mark.exists()


class _Runs:
    """Unpickled, this makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (self.path,)


class Speculators:
    """speculators 0.9.0: ``data_generation/offline.py``, with hs-connectors 0.9.0: ``transfer.py``."""

    def __init__(self) -> None:
        from hs_connectors import FileTransfer
        from speculators.data_generation import offline

        self.offline, self.transfer = offline, FileTransfer

    def write(self, folder: Path, data: torch.Tensor) -> Path:
        """A file as vLLM's connector writes them."""
        path = folder / "hs_0.safetensors"
        save_file({"token_ids": torch.arange(TOKENS), "hidden_states": data}, path)
        return path

    def half_counts(self, folder: Path, seed: int) -> bool:
        """Whether a file cut at a random byte counts as done for ``get_existing_hidden_state_indices``."""
        path = self.write(folder, states(seed))
        os.truncate(path, random.Random(seed).randrange(1, path.stat().st_size))
        return bool(self.offline.get_existing_hidden_state_indices(folder) == [0])

    def half_not_found(self, folder: Path, seed: int) -> bool:
        """Whether such a file is missed by ``find_corrupt_hidden_state_indices``."""
        self.half_counts(folder, seed)
        return not self.offline.find_corrupt_hidden_state_indices(folder, [0])

    def nan_generated(self, folder: Path, seed: int) -> bool:
        """Whether ``check_hidden_states``, which new states go through, accepts a NaN."""
        return self._accepted(self._spoilt(seed, float("nan")))

    def nan_cached(self, folder: Path, seed: int) -> bool:
        """Whether ``FileTransfer.get_cached``, which files that are there go through, gives a NaN."""
        self.write(folder, self._spoilt(seed, float("nan")))
        return bool(self.transfer(folder).get_cached(0)["hidden_states"].isnan().any())

    def zeros_accepted(self, folder: Path, seed: int) -> bool:
        """Whether ``check_hidden_states`` accepts states of nothing but zeros."""
        return self._accepted(torch.zeros_like(states(seed)))

    def flip_accepted(self, folder: Path, seed: int) -> bool:
        """Whether a flipped bit in the states is missed by both checks, and given by ``get_cached``."""
        path = self.write(folder, states(seed))
        flip_in(path, bytes_of(states(seed)), random.Random(seed))
        found = self.transfer(folder).get_cached(0)["hidden_states"]
        missed = not self.offline.find_corrupt_hidden_state_indices(folder, [0]) and self._accepted(found)
        return missed and not torch.equal(found, states(seed))

    @staticmethod
    def _spoilt(seed: int, value: float) -> torch.Tensor:
        data = states(seed)
        data[3, 1, 5] = value
        return data

    def _accepted(self, data: torch.Tensor) -> bool:
        try:
            self.offline.check_hidden_states(
                {"token_ids": torch.arange(TOKENS), "hidden_states": data}, list(range(TOKENS))
            )
        except ValueError:
            return False
        return True


def cases() -> list[tuple[str, str, int, Callable[[Path, int], bool]]]:
    """What is tried: tool, the question, a share of the tries, and the answer for one try."""
    forge, spec = SpecForge(), Speculators()
    plane, generation = "SpecForge 0.2.0", "speculators 0.9.0"
    return [
        (plane, "SIGKILL in `SharedDirFeatureStore.put` leaves an unreadable file of final name", 2, forge.killed),
        (plane, "the same leaves a `.tmp` that the next store does not remove", 2, forge.leftover),
        (plane, "`OfflineManifestReader`, by default, counts a file cut at a random byte", 1, forge.half_counts),
        (plane, "the same with `validate_files=True`", 1, forge.half_counts_validated),
        (plane, "`put` and `get` accept a NaN", 1, forge.nan_accepted),
        (plane, "`put` and `get` accept states of nothing but zeros", 1, forge.zeros_accepted),
        (plane, "`load_feature_file` gives states with a flipped bit", 1, forge.flip_accepted),
        (plane, "`load_feature_file` runs code that a file brings along", 1, forge.code_runs),
        (generation, "`get_existing_hidden_state_indices` counts a file cut at a random byte", 1, spec.half_counts),
        (generation, "`find_corrupt_hidden_state_indices` misses it", 1, spec.half_not_found),
        (generation, "`check_hidden_states`, for new states, accepts a NaN", 1, spec.nan_generated),
        (generation, "`FileTransfer.get_cached`, for files that are there, gives a NaN", 1, spec.nan_cached),
        (generation, "`check_hidden_states` accepts states of nothing but zeros", 1, spec.zeros_accepted),
        (generation, "both checks miss a flipped bit in the states", 1, spec.flip_accepted),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="the folder they were installed into")
    parser.add_argument("--times", type=int, default=50)
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.packages))
    lines = ["| tool | what | tried | so |", "|---|---|---|---|"]
    for tool, what, share, answer in cases():
        times = max(1, arguments.times // share)
        yes = 0
        for seed in range(1, times + 1):
            with tempfile.TemporaryDirectory(dir=FAST if os.access(FAST, os.W_OK) else None) as folder:
                yes += answer(Path(folder), seed)
        lines.append(f"| {tool} | {what} | {times} | {yes} |")
        print(lines[-1], file=sys.stderr)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
