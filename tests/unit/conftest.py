"""Puts this folder on the import path, so that tests of any part can use ``toy_store`` and ``faulty_disk``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
