"""Settings from flags, environment and a TOML file, and where a model is."""
