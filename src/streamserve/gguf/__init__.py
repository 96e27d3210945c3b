"""GGUF files, as llama.cpp writes them: header, metadata and the positions of tensors."""
