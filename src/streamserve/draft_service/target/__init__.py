"""The target's side of draft services."""
