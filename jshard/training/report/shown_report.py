"""A run's report, as a notebook shows it."""

import html
from pathlib import Path

from jshard.system.errors import UserError
from jshard.training.report.run_report import REPORT


class ShownReport:
    """The report of a run; a cell that ends with it shows the page.

    Attributes:
      path: The page, one HTML file that needs no others.

    Raises:
      UserError: The run has none yet.
    """

    def __init__(self, workdir: Path):
        self.path = workdir / REPORT
        if not self.path.exists():
            raise UserError(f"{workdir} has no report yet: fit() writes it")

    def __repr__(self) -> str:
        return f"report: {self.path}"

    def _repr_html_(self) -> str:
        # A frame of its own, which keeps the page's styles from the notebook's.
        text = html.escape(self.path.read_text(encoding="utf-8"))
        style = "width:100%; height:600px; border:1px solid #8884; border-radius:6px"
        return f'<iframe srcdoc="{text}" style="{style}"></iframe>'
