"""Errors that are told to another process by name."""

import pytest

from sglang_hs_capture import errors
from sglang_hs_capture.errors import DiskFullError, GuardError, HsCaptureError, StoreError, class_of_kind, kind_of

CLASSES = [error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, HsCaptureError)]


@pytest.mark.parametrize("error", CLASSES)
def test_every_class_is_found_by_the_name_it_is_told_by(error: type[HsCaptureError]) -> None:
    assert class_of_kind(kind_of(error("why")), GuardError) is error


def test_a_class_of_another_module_is_told_by_its_nearest_base() -> None:
    class QuotaError(DiskFullError):
        """As it may be defined elsewhere."""

    assert kind_of(QuotaError("why")) == "DiskFullError"


def test_an_error_that_nobody_foresaw_has_no_kind() -> None:
    assert kind_of(ValueError("why")) is None


@pytest.mark.parametrize("kind", [None, "", "LaterError", "kind_of", "__name__"])
def test_what_names_no_class_gives_the_other_one(kind: str | None) -> None:
    assert class_of_kind(kind, StoreError) is StoreError
