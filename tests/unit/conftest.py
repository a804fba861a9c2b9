"""Puts this folder on the import path, so that tests of any part can use ``toy_store`` and ``faulty_disk``."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# A busy machine is no reason for a test to fail.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
