"""The parts of the exactly solvable problem; ``tests.helpers.exact_problem`` is its front door."""
