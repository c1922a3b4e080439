"""What a run leaves for its readers: the model card, the report page, and reading both back."""

from hf_cgd.cards.html_report import html_report
from hf_cgd.cards.loading import load_report, load_reports, load_run
from hf_cgd.cards.record import REPORT_FILE, RUN_FILE, SETTINGS_FILE, DataFacts, ModelFacts, RunRecord, write_reports
from hf_cgd.cards.writing import CARD_FILE, write_card, write_record

__all__ = [
    "CARD_FILE",
    "REPORT_FILE",
    "RUN_FILE",
    "SETTINGS_FILE",
    "DataFacts",
    "ModelFacts",
    "RunRecord",
    "html_report",
    "load_report",
    "load_reports",
    "load_run",
    "write_card",
    "write_record",
    "write_reports",
]
