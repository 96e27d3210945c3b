"""Drafters: a draft model or the target's first layers (model.py), and prompt lookup (ngram.py)."""
