"""The computation of a step on a CPU, from a StepPlan to its StepResult, whatever the backend.

    executor.py     TorchExecutor.run: copies, one forward pass over all query tokens, sampling, compaction
      passes.py       the interface of a model for drafters: one pass over a layout
      kv_cache.py     the pool of KV blocks of one group; kv_vectors.py stores keys and values in 8 bits
      branches.py     the state of each sequence, and output choices that walk down a token tree
        sampling.py     logits to a token under Gumbel noise; noise.py is that noise, to the bit
        verify.py       follows the tokens that the target samples down a draft tree
        rejection.py    follows draft tokens that were drawn at random, by rejection sampling
        draft_selection.py   from a draft model's logits to draft tokens
        grammar.py      the tokens that a grammar allows at a node
        logprobs.py     log-probabilities of the model's raw distribution
      pooling.py      vectors of embedding requests; running_sum.py keeps mean pooling between steps
      swap.py         the host pool: blocks are copied out and back while steps run
    memory.py       free memory divided into KV pool and host pool

The GPU's executor (backends/cuda/executor.py) uses branches, sampling's parameters and grammars from
here and does the rest on the device.
"""
