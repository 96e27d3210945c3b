"""Scheduling decisions as pure functions of plain data: no clock, no input or output."""
