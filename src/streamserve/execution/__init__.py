"""Execution of steps on tensors: from a checkpoint's files to the tokens of a step.

    loading/    load.py makes what a worker runs: a model, its KV caches, drafters and an executor
      │ reads                │ packs and makes
      ▼                      ▼
    formats/  ──────▶  model/  ◀────── backends/     reference (plain torch), native (CPU kernels), cuda
    files to tensors   the spec, the     │           each computes attention and linear maps its own way
                       forward pass,     ▼
                       LoRA  ◀───── compute/         executor.py runs a StepPlan: layout, forward pass,
                                                     sampling, verification of trees, compaction of KV

    drafters/   where draft tokens come from; profile/ measured costs of steps

A worker calls `loading.load` once and then, for each step, `run` of the executor that it returned
(contracts/plan.py has its interface). Both executors take the same plans: compute/executor.py on a CPU and
backends/cuda/executor.py on a GPU.

Files import each other in no circle, and folders neither, with one exception: a ModelSpec says in which of
formats/'s ways its weights are stored, and formats/ reads the tensors that a ModelSpec requires.
"""
