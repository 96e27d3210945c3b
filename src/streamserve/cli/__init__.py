"""The `streamserve` command: one file per command."""
