"""SGLang out-of-tree platform ``hs_capture_cpu``: the real engine on a machine without an accelerator.

SGLang finds ``activate`` through the entry point group ``sglang.srt.platforms`` and asks every installed platform
whether it wants to serve; this one does only when it was chosen by name, with ``SGLANG_PLATFORM=hs_capture_cpu``. It is
meant for tests, for the demo and for a dry run of a pipeline: values are exact, speed is not the point.
"""

import os

PLATFORM_NAME = "hs_capture_cpu"


def activate() -> str | None:
    """Name the platform's class if this platform was chosen by name, and None otherwise."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    return "sglang_hs_capture.platform.srt_cpu:CaptureCpuPlatform"
