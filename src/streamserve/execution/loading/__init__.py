"""Loading: from a worker's configuration to everything that it runs.

    load.py          load: chooses the backend, divides memory, makes executor and drafters
      load_models.py   the target and its draft model on a CPU; device.py on a GPU, with rank.py for
                       the processes of tensor parallelism, and device_limits.py for what is refused
      weights.py       makes a Model layer by layer: reads matrices with formats/, packs them with the
                       LinearMakers of the backend, and takes from a store
                       (backends/native/weight_store.py) what another worker has packed
      loaded.py        inputs and results that CPU and GPU share: the source, dtypes, sizes of KV pools
    footprint.py     the memory that a model would take, without loading it (for models on demand)
    describe.py      architecture, sizes and memory of a checkpoint for the `models` commands

workers/ calls `load` in a worker's process; profile/ calls it to measure. Whatever is wrong with the files
raises CheckpointError here, before the first request.
"""
