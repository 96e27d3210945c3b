"""Numbers in messages to people."""

_EXACT = 2**63


def plain(value: float) -> str:
    """Return a number as text. A whole number has all its digits (2147483647, not 2.14748e+09), unless it is
    larger than any count or size."""
    whole = abs(value) <= _EXACT and value == int(value)
    return str(int(value)) if whole else f"{value:g}"
