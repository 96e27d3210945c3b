"""What processes agree on: messages, sampling parameters, cost curves, declared settings, keys, errors."""
