"""What all unit tests need before any of them is imported: this folder on the path, and Triton's interpreter."""

import os
import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# Triton decides at its import; without a GPU its kernels run in its interpreter.
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# A busy machine is no reason for a test to fail. `make fuzz` asks for more examples.
settings.register_profile("unhurried", deadline=None, max_examples=int(os.environ.get("HS_CAPTURE_FUZZ", "100")))
settings.load_profile("unhurried")
