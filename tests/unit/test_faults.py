"""Each fault under the store strikes a few times here, so that the account of ``make faults`` can be trusted to run."""

import pytest

from tests.faults import store
from tests.faults.__main__ import try_fault
from tests.faults.account import Account, Fault, NotStruckError, Outcome, table


@pytest.mark.parametrize("fault", store.FAULTS, ids=lambda fault: fault.name)
def test_nothing_acknowledged_is_lost_and_nothing_wrong_is_given(fault):
    # Faults that wait for a step may miss it in a try.
    account = try_fault(fault, 2, first=1)
    if account.not_possible:
        pytest.skip(account.not_possible)
    assert account.outcomes
    assert account.sound


def test_the_account_counts_what_was_lost():
    outcomes = [Outcome(5, 0, 0, 0.002, "full"), Outcome(7, 1, 0, 2.5, "full"), Outcome(1, 0, 0, None)]
    fault = Fault("a fault", "store", 3, lambda folder, number: outcomes[number])
    account = try_fault(fault, 3, first=0)
    assert not account.sound
    assert table([account]).splitlines()[2] == "| a fault | store | 3 | 13 | 1 | 0 | 1.3 s, 2.5 s | `full` |"


def test_tries_that_miss_do_not_count():
    def strike(_folder, number):
        if number % 2:
            raise NotStruckError
        return Outcome(1, 0, 0, None)

    account = try_fault(Fault("a fault", "store", 5, strike), 5, first=0)
    assert (len(account.outcomes), account.not_struck, account.sound) == (3, 2, True)
    assert table([account]).splitlines()[2] == "| a fault | store | 3 | 3 | 0 | 0 | goes on |  |"


def test_what_a_machine_cannot_do_is_said():
    account = Account(Fault("a fault", "store", 1, lambda *_: Outcome(0, 0, 0, None)), [], not_possible="needs root")
    assert account.row().endswith("| needs root |")
