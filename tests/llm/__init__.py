"""Tests of the library for scripts."""
