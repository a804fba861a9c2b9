"""Faults that can be struck again and again, and the account of what they did: ``python -m tests.faults --help``."""

import sys
from pathlib import Path

# The stand-ins for disks, stores and servers are those of the unit tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
