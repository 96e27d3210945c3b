"""Pieces of text that are hard to tokenize when they arrive in parts."""

WORDS = [
    "the",
    " quick ",
    "br",
    "own",
    " Grüße",
    " 日",
    "本 ",
    "🙂",
    "e\u0301",
    "\n",
    "  ",
    "12",
    "3,",
    " don",
    "'t",
    "<|im_",
    "end|>",
]
