"""Drafters: where draft tokens come from. The engine calls them as a `Drafter` (contracts/plan.py).

    choice.py              reads `--draft`, and checks that a draft model has the target's vocabulary
    model.py               ModelDrafter: a draft model with separate KV, or the target's first layers
      chains.py              the interface of a device that drafts whole chains in one launch
      ahead.py               chains that are drafted before the tokens that precede them are known
    common_vocabulary.py   adapts a draft model whose embedding has more or fewer rows than the target's
    ngram.py               NGramDrafter: prompt lookup
    path_state.py          penalties and grammar along a path, for both drafters
    fingerprints.py        hashes by which a draft service and its targets compare tokenizers

loading/ makes the drafter of a worker. The drafter that asks a draft service is in workers/remote_drafter.py.
"""
