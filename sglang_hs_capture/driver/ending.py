"""Why a run ends before its input does, and how suddenly."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ending:
    """The first reason to end a run; everything that takes long is raced against it.

    ``stop`` lets what is in flight finish, ``fail`` does not.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.signal: signal.Signals | None = None
        self._stopped = asyncio.Event()
        self._cut = asyncio.Event()
        self._failed = asyncio.Event()

    @property
    def stopped(self) -> bool:
        """Whether nothing more is to be begun."""
        return self._stopped.is_set()

    @property
    def failed(self) -> bool:
        """Whether there is nothing to wait for any more."""
        return self._failed.is_set()

    def stop(self, error: Exception | None = None, *, send_accepted: bool = False) -> None:
        """End in order; with ``send_accepted``, what was taken from the input before is still sent."""
        if not self.stopped:
            self.error = error
        self._stopped.set()
        if not send_accepted:
            self._cut.set()

    def fail(self, error: Exception) -> None:
        """End at once; such a reason counts more than one to end in order."""
        if not self.failed:
            self.error = error
        self._failed.set()
        self._stopped.set()
        self._cut.set()

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Do ``work`` until a reason to end comes up; None if one did."""
        return await self._race(work, self._stopped)

    async def unless_cut(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Do ``work`` until nothing more is to be sent; None if it came to that."""
        return await self._race(work, self._cut)

    async def unless_failed(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T | None:
        """Do ``work`` until a failure or the time limit; None if one of them came first."""
        return await self._race(work, self._failed, timeout_s)

    @staticmethod
    async def _race(work: Coroutine[Any, Any, T], event: asyncio.Event, timeout_s: float | None = None) -> T | None:
        task, ended = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({task, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for future in (task, ended):
                future.cancel()
            await asyncio.gather(task, ended, return_exceptions=True)

    @contextmanager
    def signals(self, tell: Callable[[signal.Signals], None], kill: Callable[[], None]) -> Iterator[None]:
        """Turn the first signal into ``stop``; at the second one kill the server and be gone.

        Args:
            tell: shows the user what the first signal does.
            kill: ends a server of one's own at once.
        """
        loop = asyncio.get_running_loop()

        def handle(caught: signal.Signals) -> None:
            if self.signal is not None:
                kill()
                os._exit(128 + caught)
            self.signal = caught
            tell(caught)
            self.stop()

        # Whoever started this process with a signal ignored, such as nohup, wants it to stay so.
        handled = [s for s in CAUGHT if signal.getsignal(s) is not signal.SIG_IGN]
        for caught in handled:
            loop.add_signal_handler(caught, handle, caught)
        try:
            yield
        finally:
            for caught in handled:
                loop.remove_signal_handler(caught)
