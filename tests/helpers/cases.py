"""Products of cases, of which a few are quick and the others slow."""

from itertools import product

import pytest


def chosen(quick, *values):
    """Return the quick cases, and as slow ones the others of the product of all values."""
    others = [case for case in product(*values) if case not in quick]
    return [*quick, *(pytest.param(*case, marks=pytest.mark.slow) for case in others)]


def crossed(first, second):
    """Return two cases of two values, and as slow ones each value with the other case's."""
    others = (first[0], second[1]), (second[0], first[1])
    return [first, second, *(pytest.param(*case, marks=pytest.mark.slow) for case in others)]
