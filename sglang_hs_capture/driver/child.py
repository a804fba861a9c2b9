"""Becomes another program after asking the kernel to be killed when the parent ends.

Run as ``python -m sglang_hs_capture.driver.child PARENT_PID COMMAND...``. The request survives ``exec``, and making it
here rather than between fork and exec keeps it safe in a parent with threads.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def main(args: Sequence[str]) -> None:
    """Arrange the end, and start the command in place of this process."""
    parent, command = int(args[0]), list(args[1:])
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request was made
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
