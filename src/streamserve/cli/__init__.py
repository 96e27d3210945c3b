"""The `streamserve` command: one file a command."""
