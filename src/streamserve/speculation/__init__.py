"""Token-tree speculation: which trees to draft, which to verify, and learning from the outcome."""
