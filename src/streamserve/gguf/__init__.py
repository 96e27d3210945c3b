"""GGUF files, as llama.cpp writes them: their header, their metadata, where their tensors lie."""
