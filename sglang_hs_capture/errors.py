"""Every error this project raises on purpose.

Each message says what was expected, what came, where, and what to do; the command line prints it as one line and exits
with the class's ``exit_code``.
"""


class HsCaptureError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class ConfigError(HsCaptureError):
    """A capture setting is missing, unknown or out of range."""

    exit_code = 2


class GuardError(HsCaptureError):
    """The engine runs in a mode in which captured states would be wrong or missing."""

    exit_code = 3


class StoreError(HsCaptureError):
    """The dataset cannot be written or read."""

    exit_code = 4


class DatasetMismatchError(StoreError):
    """An existing dataset was captured from another model, or with other settings."""


class DatasetLockedError(StoreError):
    """Another process is writing to the dataset."""


class DiskFullError(StoreError):
    """Free space fell under the floor, or the file system refused a write for lack of space."""


class CorruptionError(StoreError):
    """Bytes on disk are not what the journal says they are."""


class InputError(HsCaptureError):
    """A conversation file, or one line of it, cannot be used."""

    exit_code = 5


class EngineError(HsCaptureError):
    """SGLang did not start, died, or does not run the capture classes."""

    exit_code = 6


def error_of(name: str, text: str) -> HsCaptureError:
    """An error that another process told of: of the class of that name in this module, if there is one."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, HsCaptureError):
        return kind(text)
    return HsCaptureError(text)
