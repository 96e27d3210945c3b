"""An engine for tests of the benchmark's processes: the next token is the length of the text."""

import json
import os
from typing import Any


class Engine:
    """A fake engine. A workload named `short` ends too early, and one named `leave` ends the process."""

    version = "1"
    precision = "exact"

    def __init__(
        self, checkpoint: str, converted: str, threads: int, kv_bytes: int, options: dict[str, Any]
    ) -> None:
        print("engines print what they like")
        self.options = options
        self.seen: list[list[list[int]]] = []

    def generate(self, prompts: list[list[int]], max_tokens: int, work: dict[str, Any]) -> list[list[int]]:
        self.seen.append(json.loads(json.dumps(prompts)))
        if work["name"] == "leave":
            os._exit(3)
        count = max_tokens - (work["name"] == "short")
        return [[len(prompt) + i for i in range(count)] for prompt in prompts]

    def close(self) -> None:
        print("closed")
