"""LoRA adapters of a loaded model: read PEFT's folders, and add the adapters to linear maps.

    table.py     AdapterTable: the adapters that a worker has loaded
      weights.py   the matrices of an adapter, checked against the base model
        config.py    adapter_config.json; targets.py: the modules that it names
      step.py      the adapters of a step's rows, and their addition in plain torch
      types.py     loaded adapters and the adapters of a step, as kernels and plain torch read them

loading/ makes the table of a worker, and says how adapters are packed for the kernels
(backends/native/lora.py). Before a forward pass, compute/ gets the adapters of the pass's rows from the
table; model/forward.py adds them to linear maps, as the native backend does in its kernels.
"""
