"""What travels between processes: messages, sampling parameters and configuration, as msgspec structs."""
