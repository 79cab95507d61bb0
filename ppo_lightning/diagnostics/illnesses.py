"""Names of the illnesses of a run, as verdicts and settings use them."""

from __future__ import annotations

from ppo_lightning.diagnostics.rules import RULES

ILLNESSES = tuple(sorted(rule.illness for rule in RULES))
"""Those that this project's table knows; a detector of one's own may report others."""

UPDATE_ILLNESSES = frozenset({"nonfinite_update", "update_too_large"})
"""Found in the update itself: as a rule the policy that it began with was still well."""
