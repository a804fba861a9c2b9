"""Tokenising in one process against several, with the demo's tokenizer and conversations made of the demo's text.

For each number of processes it times the samples after all processes are ready, and counts this process's own
processor time: what is left for it (parsing, and passing conversations and tokens on) limits how far more processes
help. On a machine with other work only the processor times say something.

    python -m benchmarks.tokenise --workers 1 2 4 8 16
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from concurrent.futures import wait
from pathlib import Path

from benchmarks.report import write_json
from sglang_hs_capture.data import parallel
from sglang_hs_capture.demo.tokenizer import demo_texts, train_tokenizer
from sglang_hs_capture.driver.source import Source

TURNS = 4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--label", default="", help="becomes part of the result's file name")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args()


def write_conversations(path: Path, count: int) -> None:
    """Conversations of four turns and some thousand tokens."""
    texts, chance = [text for text in demo_texts() if len(text) > 40], random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            asked = [{"role": "user", "content": " ".join(chance.choices(texts, k=2))} for _ in range(TURNS)]
            answers = [{"role": "assistant", "content": " ".join(chance.choices(texts, k=4))} for _ in range(TURNS)]
            turns = [message for pair in zip(asked, answers, strict=True) for message in pair]
            file.write(json.dumps({"messages": turns}) + "\n")


def measure(source: Source) -> dict[str, float]:
    """Tokens a second by the clock, and tokens for a second of this process's processor time."""
    preparer = parallel.PooledPreparer(source._load, source.workers, start_after_s=0)
    samples = source.samples(max_length=None, vocab_size=None, preparer=preparer)
    next(samples)
    begun = [time.monotonic(), time.process_time()]

    def is_ready(pool: parallel._Pool) -> bool:
        """Wait for every process before the second conversation, and begin to measure then."""
        wait(pool._first)
        begun[:] = time.monotonic(), time.process_time()
        return True

    parallel._Pool.is_ready = is_ready
    tokens = sum(len(sample.input_ids) for sample in samples)
    return {
        "tokens/s": tokens / (time.monotonic() - begun[0]),
        "tokens/cpu s": tokens / (time.process_time() - begun[1]),
    }


def main() -> None:
    arguments = parse_arguments()
    rounds: dict[str, list[dict[str, float]]] = {str(workers): [] for workers in arguments.workers}
    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer(demo_texts()).save_pretrained(folder)
        write_conversations(Path(folder) / "data.jsonl", arguments.conversations)
        for _ in range(arguments.rounds):
            for workers in arguments.workers:
                found = measure(Source([Path(folder) / "data.jsonl"], folder, workers=workers))
                rounds[str(workers)].append(found)
    medians = {
        workers: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for workers, found in rounds.items()
    }
    name = f"tokenise-{arguments.label}" if arguments.label else "tokenise"
    write_json(arguments.results, name, "tokenise", arguments, medians=medians, rounds=rounds)
    print(json.dumps(medians, indent=2))


if __name__ == "__main__":
    main()
