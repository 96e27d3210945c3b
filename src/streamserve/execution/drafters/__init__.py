"""Who guesses: a small model or the target's own first layers (model.py), or the text itself (ngram.py)."""
