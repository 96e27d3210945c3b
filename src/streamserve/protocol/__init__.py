"""What processes agree on: messages, sampling parameters, declared settings, keys, errors."""
