"""Every architecture in every format, in every way of serving: it works, or is refused by name."""
