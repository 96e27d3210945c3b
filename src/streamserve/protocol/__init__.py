"""What processes agree on: messages, sampling parameters, the settings that workers receive, keys, errors."""
