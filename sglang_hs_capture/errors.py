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


def kind_of(error: BaseException) -> str | None:
    """The name by which an error is told to another process: that of its class here, or of the nearest base here.

    None for an error that was not raised on purpose.
    """
    return next((base.__name__ for base in type(error).__mro__ if base.__module__ == __name__), None)


def class_of_kind(kind: str | None, otherwise: type[HsCaptureError]) -> type[HsCaptureError]:
    """The class that ``kind_of`` named; ``otherwise`` for None, and for a name that this release does not know."""
    found = globals().get(kind) if kind else None
    return found if isinstance(found, type) and issubclass(found, HsCaptureError) else otherwise
