"""Register and lay out tables."""

from collections.abc import Callable, Sequence

from benchmarks.figures.files import stamp

Row = Sequence[str]
TABLES: dict[str, Callable[[str], str]] = {}
"""Tables by name. Each is a function of the path from the page to the root ("../../") and returns
Markdown."""


def table(
    name: str, *files: str, brief: bool = False
) -> Callable[[Callable[[], tuple[Row, list[Row]]]], Callable[[], tuple[Row, list[Row]]]]:
    """Register a function that returns the head and the rows of the table `name`, made of these files."""

    def register(function: Callable[[], tuple[Row, list[Row]]]) -> Callable[[], tuple[Row, list[Row]]]:
        TABLES[name] = lambda up: markdown(*function()) + "\n\n" + caption(files, up, brief=brief)
        return function

    return register


def markdown(head: Row, rows: Sequence[Row]) -> str:
    """Return a Markdown table.

    Raises:
        ValueError: a row has another number of cells than the head.
    """
    if any(len(row) != len(head) for row in rows):
        raise ValueError("rows of different length")
    lines = [_line(head), _line(["---"] * len(head)), *map(_line, rows)]
    return "\n".join(line.replace("|  ", "| ") for line in lines)


def caption(files: Sequence[str], up: str, *, brief: bool = False) -> str:
    """Return one line for each result file. Several files are marked as several runs."""
    lines = ["Several runs: each file is one of them."] if len(files) > 1 else []
    lines += [f"{stamp(file, up, brief=brief)}." for file in files]
    return "\n".join(f"<small>{line}</small>" + ("<br>" if line is not lines[-1] else "") for line in lines)


def interval(
    value: float, bounds: Sequence[float], digits: int = 0, factor: float = 1.0, unit: str = ""
) -> str:
    """Return `value unit (low–high)`."""
    low, high = (f"{bound * factor:.{digits}f}" for bound in bounds)
    return f"{value * factor:.{digits}f}{unit} ({low}–{high})"


def _line(cells: Row) -> str:
    return "| " + " | ".join(cells) + " |"
