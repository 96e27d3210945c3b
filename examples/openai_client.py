"""Stream a chat with the official client. Start `make serve`, then: python examples/openai_client.py [URL]"""

import sys

from openai import OpenAI


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is 12 + 7?"}],
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"\n({chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens)")


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["http://127.0.0.1:8000"])
