"""`streamserve models`: downloads, lists, shows and writes models."""
