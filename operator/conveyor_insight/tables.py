"""Columns of text for a terminal. Pure."""

from collections.abc import Sequence


def build_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows of as many cells each, three spaces between columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
