"""Settings from flags, environment and a TOML file, and the location of checkpoints."""
