"""On ``PYTHONPATH`` this hangs the disk of a writing process while the file that ``HS_FAULT_HANG`` names is there.

What is written and what is made durable waits; nothing fails.
"""

import os
import sys
import time


def wait_while_there(call, path):
    def hung(*args):
        while os.path.exists(path):
            time.sleep(0.01)
        return call(*args)

    return hung


if "sglang_hs_capture.writing" in sys.orig_argv and "HS_FAULT_HANG" in os.environ:
    for name in ("pwrite", "pwritev", "fsync"):
        setattr(os, name, wait_while_there(getattr(os, name), os.environ["HS_FAULT_HANG"]))
