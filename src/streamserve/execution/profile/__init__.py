"""Measured costs of steps on this machine: measuring, keeping, checking them."""
