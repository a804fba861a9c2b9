"""Runs another program so that neither it nor what it starts outlives the process that asked for it.

Run as ``python -m sglang_hs_capture.driver.child PARENT_PID COMMAND...`` in a process group of its own. When the parent
ends, however it ends, the kernel sends this process a signal, and this process kills its whole group: SGLang's own
processes follow their parent only once they are up, and could stay behind while the engine starts. SIGTERM goes to the
command alone, which then ends in order; its exit status becomes this process's.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

_PR_SET_PDEATHSIG = 1
_PARENT_GONE = signal.SIGUSR1


def main(args: Sequence[str]) -> None:
    """Arrange the end, run the command, and end as it ended."""
    parent, command = int(args[0]), list(args[1:])
    own_group = os.getpgrp() == os.getpid()
    process: subprocess.Popen[bytes] | None = None

    def end_all(*_: object) -> None:
        if own_group:
            os.killpg(0, signal.SIGKILL)
        if process is not None:
            process.kill()
        os._exit(1)

    def pass_on(caught: int, _: object) -> None:
        if process is None:
            os._exit(128 + caught)
        process.send_signal(caught)

    signal.signal(_PARENT_GONE, end_all)
    signal.signal(signal.SIGTERM, pass_on)
    _die_with(_PARENT_GONE)
    if os.getppid() != parent:  # it ended before the request was made
        sys.exit(1)
    process = subprocess.Popen(command, preexec_fn=_prepare(signal.SIGKILL))  # noqa: PLW1509 - one thread
    code = process.wait()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _die_with(signum: signal.Signals) -> None:
    """Ask the kernel for a signal when the parent ends; on Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)


def _prepare(signum: signal.Signals) -> Callable[[], None]:
    # Loaded before the fork: this process has one thread, and the child only makes the call.
    if not sys.platform.startswith("linux"):
        return lambda: None
    return partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signum)


if __name__ == "__main__":
    main(sys.argv[1:])
