"""Drafters: a small model or the target's first layers (model.py), and prompt lookup (ngram.py)."""
