"""Training of the embedded pair: tokenizer, corpus, model, optimiser, loop, export, evaluation and card."""
