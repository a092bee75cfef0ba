"""Sentences and tables as HTML, for notebooks and the report alike."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import pandas as pd


def listed(sentences: Iterable[str]) -> str:
    """A list of sentences."""
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def folded(table: pd.DataFrame, summary: str) -> str:
    """A table behind its summary; numbers have four digits, and what is missing is a dash."""
    cells = table.astype(object).where(table.notna(), "–")
    shown = cells.to_html(index=False, border=0, float_format=lambda x: f"{x:.4g}")
    return f"<details><summary>{escape(summary)}</summary>\n{shown}\n</details>\n"
