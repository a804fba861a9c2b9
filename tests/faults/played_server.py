"""A process that plays SGLang with the capture plugin, on a port that it keeps after a restart.

python -m tests.faults.played_server DIRECTORY PORT PAUSE_S: each prompt takes so long, so that a fault strikes
while there is work.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

from fake_server import FakeServer


class OnPort(FakeServer):
    """Listens on one port from the start."""

    def __init__(self, directory: Path, port: int, pause_s: float) -> None:
        def slowly(_number: int, _rid: str) -> str:
            time.sleep(pause_s)
            return "ok"

        super().__init__(directory, slowly)
        self.port = port
        self.record.session_id = os.urandom(16).hex()

    async def _listen(self, port: int) -> None:
        await super()._listen(self.port)


async def main(directory: Path, port: int, pause_s: float) -> None:
    async with OnPort(directory, port, pause_s):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
