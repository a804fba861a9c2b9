"""The command line, ``hs-capture``."""
