"""Settings from flags, environment and a TOML file, checks of them, and where checkpoints are."""
