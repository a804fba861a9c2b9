"""On ``PYTHONPATH`` this makes a writing process slow, and lets it overwrite each piece of the ring that it gives back.

A row that is read too late, or a copy that comes too early, then stores the sentinel. ``HS_DISK_BYTES_PER_S`` is the
speed of the disk.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time

RING = "sglang_hs_capture.staging.ring"
SENTINEL = 0xA5


def slow_down() -> None:
    speed = float(os.environ["HS_DISK_BYTES_PER_S"])

    write = os.pwritev

    def wait_and_write(fd, views, offset):
        time.sleep(sum(view.nbytes for view in views) / speed)
        return write(fd, views, offset)

    os.pwritev = wait_and_write


class OverwritingRing(importlib.abc.MetaPathFinder):
    """Finds the ring's module as usual, and changes what giving a piece back does."""

    def find_spec(self, name, path, target=None):
        if name != RING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            overwrite_on_release(module)

        spec.loader.exec_module = exec_module
        return spec


def overwrite_on_release(ring) -> None:
    lease_of, release = ring.Consumer.lease, ring.Consumer._release

    def lease(self, span):
        taken = lease_of(self, span)
        taken.span = span
        return taken

    def overwrite_and_release(self, taken):
        if taken.users == 1:
            self.data(taken.span)[:] = bytes([SENTINEL]) * taken.span.nbytes
        release(self, taken)

    ring.Consumer.lease, ring.Consumer._release = lease, overwrite_and_release


if "sglang_hs_capture.writing" in sys.orig_argv:
    slow_down()
    sys.meta_path.insert(0, OverwritingRing())
