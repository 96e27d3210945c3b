"""LiteLLM: a chat, whole and streamed.

Run it with a Python that has LiteLLM: use_litellm.py URL.
"""

import json
import sys

import litellm

QUESTION = [{"role": "user", "content": "What is 12 + 7?"}]


def main(url: str) -> None:
    common = {"model": "openai/small", "api_base": f"{url}/v1", "api_key": "none", "messages": QUESTION}
    whole = litellm.completion(**common, temperature=0)
    stream = litellm.completion(**common, temperature=0, stream=True)
    print(
        json.dumps(
            {
                "whole": whole.choices[0].message.content,
                "streamed": "".join(part.choices[0].delta.content or "" for part in stream),
                "prompt_tokens": whole.usage.prompt_tokens,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
