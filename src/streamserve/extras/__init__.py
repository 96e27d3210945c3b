"""Optional parts: only composition roots import them (tests/test_import_rules.py)."""
