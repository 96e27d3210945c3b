"""What a model is: its specification, read from a config, and the forward pass that is the same for all.

    architectures.py   the supported architectures as data: in which points each differs from Llama
    spec.py            ModelSpec: sizes and these points, read from config.json with fields.py, which names
                       the file and the field in every error; rope_spec.py, experts.py and
                       end_of_text.py read the parts about positions, mixtures of experts and tokens that
                       end a text
    shapes.py          names, shapes and sizes of the tensors that a spec requires
    forward.py         Model: the forward pass over the rows of a step's layout. It calls
      linear.py          the linear maps, which a backend may replace by its own
      rope.py            rotary position embedding
      mixture.py         a mixture of experts
      lora/              LoRA adapters, and what they add to the maps
      attention.py       the interface of attention over the KV cache, which a backend implements
    layout.py          the rows of a step's spans with their positions and cache slots

formats/ makes a ModelSpec from other files (GGUF's metadata) and reads the tensors; loading/weights.py makes
a Model of both. compute/executor.py calls the model once for each step, drafters/model.py for each draft
token.
"""
