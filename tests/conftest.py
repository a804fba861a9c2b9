"""What all tests need before any of them runs."""

import signal

# What a script starts in its background has SIGINT ignored, and so would every run that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
