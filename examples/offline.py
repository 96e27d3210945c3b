"""Generate from a script: no server, results in vLLM's shape. Usage: python examples/offline.py [MODEL]"""

import sys

from streamserve import LLM, SamplingParams

QUESTIONS = [
    "What is 12 + 7?",
    "Who are you?",
    "Tom has 8 apples and buys 5 more. How many apples does he have?",
]


def main(model: str) -> None:
    with LLM(model) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        answer = output.outputs[0]
        print(f"{question}\n  {answer.text!r}  ({len(answer.token_ids)} tokens, {answer.finish_reason})")


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["embedded"])
