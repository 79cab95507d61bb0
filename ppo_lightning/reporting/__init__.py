"""From a run's log to a report: reading, examination, text, JSON and a page."""

from ppo_lightning.reporting.columns import MAPS, ColumnMap, Target
from ppo_lightning.reporting.examination import EXIT_CODES, Examination, Spell, examine
from ppo_lightning.reporting.load import Change, Run, load_run
from ppo_lightning.reporting.needs import NEEDS, blind_rules
from ppo_lightning.reporting.page import report_html
from ppo_lightning.reporting.record import RECORD_VERSION, report_record
from ppo_lightning.reporting.text import report_text
from ppo_lightning.reporting.timeline import Happening, timeline

__all__ = [
    "EXIT_CODES",
    "MAPS",
    "NEEDS",
    "RECORD_VERSION",
    "Change",
    "ColumnMap",
    "Examination",
    "Happening",
    "Run",
    "Spell",
    "Target",
    "blind_rules",
    "examine",
    "load_run",
    "report_html",
    "report_record",
    "report_text",
    "timeline",
]
