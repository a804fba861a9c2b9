"""Strikes each fault many times and writes the account: python -m tests.faults --output account.md.

The exit code is 1 if an acknowledged sample was lost, a wrong one was given, or a fault never struck.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.faults import engine, process, run, store
from tests.faults.account import Account, Fault, NotPossibleError, NotStruckError, table

FAULTS = [*store.FAULTS, *process.FAULTS, *run.FAULTS, *engine.FAULTS]
FAST = "/dev/shm"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", nargs="+", choices=sorted({fault.where for fault in FAULTS}), help="by default all")
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--times", type=float, default=1.0, help="of the usual number of tries")
    parser.add_argument("--first", type=int, default=0, help="number of the first try, which stands for its seed")
    parser.add_argument("--output", type=Path, help="a file for the table; printed in any case")
    return parser.parse_args()


def try_fault(fault: Fault, times: int, first: int) -> Account:
    """Strike a fault as often as asked, each time in a folder of its own."""
    account = Account(fault, [])
    for number in range(first, first + times):
        # In memory where there is such a thing: the disk's own speed is not what is tried.
        with tempfile.TemporaryDirectory(dir=FAST if os.access(FAST, os.W_OK) else None) as folder:
            try:
                account.outcomes.append(fault.strike(Path(folder), number))
            except NotStruckError:
                account.not_struck += 1
            except NotPossibleError as error:
                account.not_possible = str(error)
                break
            except Exception as error:
                error.add_note(f"in try {number} of: {fault.name}")
                raise
    return account


def main() -> None:
    arguments = parse_arguments()
    chosen = [f for f in FAULTS if (not arguments.where or f.where in arguments.where) and arguments.only in f.name]
    accounts: list[Account] = []
    for fault in chosen:
        begin = time.monotonic()
        accounts.append(try_fault(fault, max(1, round(fault.times * arguments.times)), arguments.first))
        struck, missed = len(accounts[-1].outcomes), accounts[-1].not_struck
        print(f"{fault.name}: {struck} times, {missed} missed, {time.monotonic() - begin:.1f} s", file=sys.stderr)
        # As far as it goes: what takes long may be ended early.
        if arguments.output:
            arguments.output.write_text(table(accounts))
    print(table(accounts))
    sys.exit(not all(account.sound and (account.outcomes or account.not_possible) for account in accounts))


if __name__ == "__main__":
    main()
