"""How the reader of the ring learns that a copy has arrived: the device writes the piece's number, in stream order.

No event is waited for on the host, so that the scheduler's process needs no thread of its own beside the scheduler's.
"""

import ctypes

import torch

from sglang_hs_capture.errors import EngineError
from sglang_hs_capture.staging.ring import RingMemory


class Doorbell:
    """Writes piece numbers into a ring's ``ready`` word."""

    def ring(self, number: int, stream: torch.cuda.Stream | None) -> None:
        """Say that piece ``number`` is there once all that ``stream`` was given before is done."""
        raise NotImplementedError


class HostDoorbell(Doorbell):
    """For copies that are done when the call returns."""

    def __init__(self, memory: RingMemory) -> None:
        self._memory = memory

    def ring(self, number: int, stream: torch.cuda.Stream | None) -> None:
        del stream
        self._memory.set_ready(number)


class CudaDoorbell(Doorbell):
    """For copies on a CUDA stream.

    ``cuStreamWriteValue64`` without flags is a write that the driver puts behind a fence with the reach of the whole
    system: whoever sees the number sees all that the stream wrote to the host before it.
    Source: CUDA driver API, stream memory operations.
    """

    def __init__(self, address: int) -> None:
        """Prepare for a word of pinned memory at ``address``, in the current CUDA context.

        Raises:
            EngineError: the driver has no such operation.
        """
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            self._write = driver.cuStreamWriteValue64_v2
            locate = driver.cuMemHostGetDevicePointer_v2
        except (OSError, AttributeError) as error:
            raise EngineError(
                f"expected a CUDA driver with stream memory operations (12.0 or newer): {error}; update the driver"
            ) from error
        self._write.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]
        pointer = ctypes.c_uint64()
        _check(locate(ctypes.byref(pointer), ctypes.c_void_p(address), 0), "find the ring's device address")
        self._pointer = pointer.value

    def ring(self, number: int, stream: torch.cuda.Stream | None) -> None:
        assert stream is not None
        _check(self._write(stream.cuda_stream, self._pointer, number, 0), "write to the ring in stream order")


def _check(result: int, action: str) -> None:
    if result != 0:
        raise EngineError(
            f"the CUDA driver could not {action} (error {result}); the log of the server may say what happened before"
        )
