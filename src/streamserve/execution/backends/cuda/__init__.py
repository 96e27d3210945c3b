"""Models on a GPU: packed weights, Triton kernels, captured graphs, and sampling on the device.

    device.py        the choice of the device, and its free memory
    packing.py       weights of 8 and 4 bits; linear.py, experts.py and routing.py multiply by them
    model.py         the forward pass, with fixed addresses
    warm_up.py       compiles kernels while weights are loaded, then captures decoding steps
    executor.py      DeviceExecutor: launches a step without waiting, and reads its results later
      runner.py        uploads a pass's inputs, pads them to a shape, and launches the shape's graph
        passes.py        the shapes, and the layouts of their arrays; buffers.py uploads them in one copy
        attention.py     divides attention into items of work of even size
        draws.py         packs the parameters on which the choice of a token depends
        graphs.py        captures the work of a shape once, and replays it
        operations.py    the operations of a pass: kernels/ (Triton) or plain/ (torch)
      decoding.py      updates the arrays of a decoding step from the arrays of the previous step
      swap.py          the host pool of evicted KV
    chains.py        drafts chains in one captured loop; draft_vocabulary.py adapts the draft model's rows
    landing.py       host memory that other workers write KV to
    sharding.py      shards of a model for tensor parallelism; ranks.py leads the other ranks' processes
                     (loading/rank.py), and collectives.py adds and joins their results

loading/device.py makes all of it for a worker. A worker then calls the executor as it calls the CPU's.
"""
