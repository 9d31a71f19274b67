"""Invariant: whatever is done to a manager, in whatever order, it gives what its plain model gives."""

import pytest
from hypothesis import settings
from manager_machine import ManagerMachine

pytestmark = pytest.mark.timeout(600)  # a failure is made small for up to five minutes

TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=15, stateful_step_count=20)
