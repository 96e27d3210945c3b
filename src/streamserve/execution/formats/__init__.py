"""Checkpoint formats: from files that strangers wrote to checked tensors under Hugging Face names.

    open.py          open_checkpoint: the ModelSpec and the tensors of a folder or a GGUF file
      checkpoint.py    safetensors, memory-mapped (mapped.py), validated before anything is loaded
      gguf/            GGUF: metadata to a ModelSpec, names to Hugging Face names, blocks of integers
      check.py         the checkpoint has exactly its model's tensors
    stored/          quantized checkpoints (AWQ, GPTQ, FP8, MXFP4, compressed-tensors): a module for each
                     method; export.py writes such a folder
    quantization.py  weights of 8 and 4 bits as all formats represent them, and rounding to them
    shards.py        writes safetensors shards and their index
    inflate.py       writes a larger checkpoint that computes the same function, for measurements

loading/ calls `open_checkpoint` and then reads matrix by matrix. No format runs code from a file, and sizes
are bounded by the file's own size before memory is reserved.
"""
