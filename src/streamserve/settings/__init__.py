"""Settings from flags, environment and a TOML file, the HTTP server's settings, and where checkpoints are."""
