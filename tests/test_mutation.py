"""The table of mutants fits the kernels. (Whether they are killed is for `python -m tests.mutation` to say.)"""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, Mutant
from tests.mutation import mutated


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_breaks_one_place(mutant: Mutant) -> None:
    assert mutant.old != mutant.new
    mutated(mutant)  # ValueError unless the text occurs once
