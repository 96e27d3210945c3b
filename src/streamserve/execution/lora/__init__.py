"""LoRA adapters of a loaded model: read PEFT's folders, and add the adapters to linear maps."""
