"""A process that captures prompts of a toy model with the real capture and its real writing process.

python -m tests.faults.toy_capture DIRECTORY SEED FIRST PAUSE_S: prompts from number FIRST on, with pauses between.
"""

import sys
import time
from pathlib import Path

from tests.faults.process import make_prompts
from tests.unit.toy_model import ToyModel


def main(directory: Path, seed: int, wanted: set[str], pause_s: float) -> None:
    model = ToyModel(directory)
    for rid, prompt in make_prompts(seed).items():
        if rid in wanted:
            cut = len(prompt) // 2
            for start, end in ((0, cut), (cut, len(prompt))):
                if end > start:
                    model.forward((rid, prompt, start, end))
            time.sleep(pause_s)
    model.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), set(sys.argv[3].split(",")), float(sys.argv[4]))
