"""Invariant: whatever is done to a manager in whatever order, it gives what its plain model gives."""

from hypothesis import settings
from manager_machine import ManagerMachine

TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=30, stateful_step_count=25)
