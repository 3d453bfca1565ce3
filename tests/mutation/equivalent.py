"""Generated mutants that are known to change no result. `python -m tests.mutation` names those that are gone."""

from __future__ import annotations

# Name of a mutant -> why no test can notice it.
EQUIVALENT: dict[str, str] = {}
