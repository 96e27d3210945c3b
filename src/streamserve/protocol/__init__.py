"""What processes agree on: messages, sampling parameters, the settings that a worker receives, keys, errors."""
