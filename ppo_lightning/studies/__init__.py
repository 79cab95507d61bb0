"""Sweeps: a config with some settings varied, run for the same seeds, and compared."""

from ppo_lightning.studies.arms import BASE, Arm, Arms, arms_of, make_arm
from ppo_lightning.studies.compare import Comparison, Measured, Row, compare, measure
from ppo_lightning.studies.folder import keep_definition, locked, require_folder
from ppo_lightning.studies.intervals import Mean, mean_of, t_quantile
from ppo_lightning.studies.page import write_page
from ppo_lightning.studies.processes import FitProcesses
from ppo_lightning.studies.report import as_json, as_markdown, as_text
from ppo_lightning.studies.runs import (
    Outcome,
    Run,
    Runner,
    State,
    bare,
    execute,
    read_state,
    runs_of,
    write_state,
)
from ppo_lightning.studies.search import Search, Trial, ends_of, require_optuna, run_search
from ppo_lightning.studies.values import (
    Range,
    Variation,
    canonical,
    check_keys,
    parse_vary,
    short_names,
    written,
)

__all__ = [
    "BASE",
    "Arm",
    "Arms",
    "Comparison",
    "FitProcesses",
    "Mean",
    "Measured",
    "Outcome",
    "Range",
    "Row",
    "Run",
    "Runner",
    "Search",
    "State",
    "Trial",
    "Variation",
    "arms_of",
    "as_json",
    "as_markdown",
    "as_text",
    "bare",
    "canonical",
    "check_keys",
    "compare",
    "ends_of",
    "execute",
    "keep_definition",
    "locked",
    "make_arm",
    "mean_of",
    "measure",
    "parse_vary",
    "read_state",
    "require_folder",
    "require_optuna",
    "run_search",
    "runs_of",
    "short_names",
    "t_quantile",
    "write_page",
    "write_state",
    "written",
]
