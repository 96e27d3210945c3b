"""Profiles, the measured costs of steps on this machine: measure, store and validate them."""
