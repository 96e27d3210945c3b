"""Decisions as pure functions of plain data: no clock, no input or output, nothing but stdlib and numpy."""
