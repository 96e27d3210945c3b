"""Data exchanged between processes: messages, sampling parameters and configuration, as msgspec structs."""
