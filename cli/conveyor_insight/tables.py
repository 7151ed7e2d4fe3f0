"""Formats tables for a terminal. Pure."""

from collections.abc import Sequence


def build_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return the rows as lines, with three spaces between columns. All rows must have the same number of cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
