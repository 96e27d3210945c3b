"""One draft model for N real servers on this machine: inflated targets whose text is the packaged model's,
without a draft, with a draft service (default settings: admission, batches), and with a separate draft for
each.

All processes share this machine's processors, so compare a target's speed only at the same N. Every target
answers one request at a time.

    python -m benchmarks.papers.star_live
"""

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from benchmarks.options import parse
from benchmarks.papers.star_rig import PROMPTS, Service, inflate
from benchmarks.report import PACKAGED_PAIR, table, write
from streamserve.llm.async_llm import AsyncLLM
from streamserve.llm.llm import LLM
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.resolve import resolve
from streamserve.text.output import ChoiceDelta


@contextlib.asynccontextmanager
async def servers(model: Path, count: int, draft: str) -> AsyncIterator[list[AsyncLLM]]:
    """Run `count` servers, each with one worker process and one thread."""
    options = {"threads": 1, "num_blocks": 256, "draft": draft, "log_level": "error", "profile": False}
    llms = [AsyncLLM(resolve(str(model), options)) for _ in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        for llm in llms:
            await llm.start()
            stack.push_async_callback(llm.close)
        yield llms


async def keep_asking(llm: AsyncLLM, prompts: list[list[int]], tokens: int, start: float, end: float) -> Any:
    """Send requests one after another; return the tokens received between `start` and `end` of the clock, and
    the first answers."""
    counted, number = 0, 0
    texts: dict[int, list[int]] = {}
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    while time.monotonic() < end:
        position = number % len(prompts)
        said: list[int] = []
        async with aclosing(llm.submit(prompts[position], params, request_id=f"r{number}")) as items:
            async for item in items:
                if isinstance(item, ChoiceDelta):
                    said += item.tokens
                    counted += len(item.tokens) if start <= time.monotonic() < end else 0
        texts.setdefault(position, said)
        assert texts[position] == said, "the same prompt, another text"
        number += 1
    return counted / (end - start), texts


async def run(
    model: Path, count: int, draft: str, prompts: list[list[int]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return each target's tokens a second."""
    async with servers(model, count, draft) as llms:
        start = time.monotonic() + arguments.warm
        end = start + arguments.seconds
        measured = await asyncio.gather(
            *(
                keep_asking(llm, prompts[number:] + prompts[:number], arguments.outputs, start, end)
                for number, llm in enumerate(llms)
            )
        )
        reports = [llm.report() for llm in llms]
        ready = [llm.ready for llm in llms]
    remote = [report.remote for report in reports if report and report.remote]
    texts: dict[int, list[int]] = {}
    for number, (_, said) in enumerate(measured):
        for position, text in said.items():
            prompt = (position + number) % len(prompts)
            texts.setdefault(prompt, text)
            assert texts[prompt] == text, "targets differ"
    return {
        "targets": count,
        "per_target": [speed for speed, _ in measured],
        "from_services": sum(one.accepted for one in remote),
        "from_n_grams": sum(one.fallback_accepted for one in remote),
        "kv_bytes_per_block": ready[0].kv_cache_bytes // ready[0].num_blocks,
        "texts": texts,
    }


def compare(model: Path, draft: Path, prompts: list[list[int]], arguments: argparse.Namespace) -> list[Any]:
    """Measure for each N: no draft, the service, separate drafts, and no draft again, as the machine's speed
    drifts."""
    rows = []
    for count in arguments.counts:
        service = Service(draft)
        kinds = [("none", "none"), ("service", service.address), ("own", str(draft)), ("none_again", "none")]
        row: dict[str, Any] = {"targets": count}
        for name, options in kinds:
            row[name] = asyncio.run(run(model, count, options, prompts, arguments))
            print(count, name, [round(speed, 1) for speed in row[name]["per_target"]], flush=True)
            if name == "service":
                figures = service.figures()
                row["service"] |= {
                    key: figures[metric]
                    for key, metric in (
                        ("full", "n_full"),
                        ("most", "n_max"),
                        ("turn_seconds", "batch_seconds"),
                        ("back_seconds", "return_seconds"),
                        ("plain_seconds", "plain_seconds"),
                        ("beta", "beta"),
                        ("batch", "batch"),
                    )
                }
                service.close()
        row["same_texts"] = check([row[name].pop("texts") for name, _ in kinds])
        row["gain_of_each"] = gains(row)
        rows.append(row)
    return rows


def check(texts: list[dict[int, list[int]]]) -> int:
    """Return the number of prompts that were answered in every run. Raises AssertionError if their answers
    differ."""
    shared = set.intersection(*(set(one) for one in texts))
    for prompt in shared:
        assert all(one[prompt] == texts[0][prompt] for one in texts), "a draft changed a text"
    return len(shared)


def gains(row: dict[str, Any]) -> list[float]:
    """Return each target's speed with the service relative to its speed without a draft, before and after."""
    plain = zip(row["none"]["per_target"], row["none_again"]["per_target"], strict=True)
    means = [(before + after) / 2 for before, after in plain]
    return [speed / mean for speed, mean in zip(row["service"]["per_target"], means, strict=True)]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--counts", type=int, nargs="*", default=[1, 2, 4], help="numbers of targets")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument("--warm", type=float, default=3.0, help="seconds before each measurement")
    parser.add_argument("--outputs", type=int, default=160, help="number of tokens of an answer")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size of the inflated target")
    parser.add_argument("--layers", type=int, default=8, help="layers of the inflated target")
    parser.add_argument("--out", default="star_live", help="name of the results")
    arguments = parse(parser, counts=[1], seconds=0.5, warm=0.2, outputs=16, hidden=256, layers=8)
    with tempfile.TemporaryDirectory() as name:
        model = inflate("embedded", Path(name) / "target", arguments.hidden, arguments.layers)
        draft = inflate("embedded-draft", Path(name) / "draft", 512, 2)
        with LLM("embedded", draft="none", log_level="error") as llm:
            prompts = [llm.render([{"role": "user", "content": text}]) for text in PROMPTS]
        rows = compare(model, draft, prompts, arguments)
    settings = {
        "target": f"packaged model inflated to {arguments.hidden} x {arguments.layers}, 1 thread each",
        "draft": "packaged draft inflated to 512 x 2, 1 thread; or beside each target",
        "seconds": arguments.seconds, "requests": f"one at a time, {arguments.outputs} tokens, greedy",
        "network": "loopback",
    }  # fmt: skip
    path = write(arguments.out, settings, rows, PACKAGED_PAIR)
    lines = [
        [str(row["targets"]), *(f"{sum(row[kind]['per_target']):.0f}" for kind in ("none", "service", "own")),
         f"{min(row['gain_of_each']):.2f}–{max(row['gain_of_each']):.2f}", f"{row['service']['most']:.0f}",
         str(row["same_texts"])]
        for row in rows
    ]  # fmt: skip
    columns = "N", "tokens/s, none", "service", "own drafts", "service / none, each", "N_max", "same texts"
    table("live", columns, lines)
    print(path)


if __name__ == "__main__":
    main()
