"""The operating system and the processor, as every process sees them: memory, processors, instructions,
folders, forks, signals, logs and certificates."""
