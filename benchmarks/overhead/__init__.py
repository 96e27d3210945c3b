"""Overhead of the host: decoding steps, workers, the fleet's decisions, LoRA adapters."""
