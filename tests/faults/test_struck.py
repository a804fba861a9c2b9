"""Each fault that needs several processes, or the engine, once; the store's are among the unit tests."""

import pytest

from tests.faults import engine, process, run
from tests.faults.__main__ import try_fault

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", [*process.FAULTS, *run.FAULTS], ids=lambda fault: f"{fault.where}: {fault.name}")
def test_between_processes(fault):
    assert_sound(fault)


@pytest.mark.engine
@pytest.mark.parametrize("fault", engine.FAULTS, ids=lambda fault: fault.name)
def test_under_the_engine(fault):
    assert_sound(fault)


def assert_sound(fault):
    account = try_fault(fault, 1, first=1)
    if account.not_possible:
        pytest.skip(account.not_possible)
    assert account.outcomes
    assert account.sound
