"""Every architecture in every format and way of serving works, or is refused by name."""
