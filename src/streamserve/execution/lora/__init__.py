"""LoRA adapters of a loaded model: reading PEFT's folders, and adding them to linear maps."""
