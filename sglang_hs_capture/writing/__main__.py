"""``python -m sglang_hs_capture.writing RING CHANNEL``: started by the model's process, with two open descriptors."""

import sys

from sglang_hs_capture.writing.process import main

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
