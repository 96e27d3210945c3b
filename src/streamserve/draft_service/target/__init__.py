"""A target's side of draft services."""
