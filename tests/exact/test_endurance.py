"""After many requests an engine is as fast as at the beginning, and no memory has leaked."""

import gc
import re
import statistics
import time
from pathlib import Path

import numpy as np

from streamserve import embedded
from streamserve.engine.engine import Engine
from streamserve.execution.loading.load import load
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.messages import Cancel, Finished, Submit, Token
from streamserve.protocol.sampling import SamplingParams

CONCURRENT = 32
PARTS = 8


def request(number: int) -> Submit:
    """Make a request; prompts have all lengths, some share a prefix, and sampling parameters vary."""
    rng = np.random.default_rng(number)
    start = [5 + number % 7] * (16 * int(rng.integers(0, 3)))
    prompt = start + rng.integers(5, 4000, int(rng.integers(1, 24))).tolist()
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 0.8, 1.0])),
        top_p=float(rng.choice([1.0, 0.9])),
        top_k=int(rng.choice([0, 20])),
        repetition_penalty=float(rng.choice([1.0, 1.1])),
        logprobs=None if number % 9 else 2,
        seed=number,
        n=2 if number % 11 == 0 else 1,
        max_tokens=int(rng.integers(1, 10)),
    )
    return Submit(
        f"r{number}",
        prompt,
        params,
        outputs={c: [] for c in range(params.n)},
        arrival=float(number),
    )


def serve(engine: Engine, numbers: range) -> int:
    """Serve these requests to the end, CONCURRENT at a time, and cancel a few; return their tokens."""
    waiting, open_choices, tokens = iter(numbers), {}, 0
    for _ in range(CONCURRENT):
        _submit(engine, waiting, open_choices)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Token):
                tokens += 1
            if isinstance(event, Finished) or (isinstance(event, Token) and event.finish):
                _end(engine, waiting, open_choices, event.request)
        victim = next(iter(open_choices), "")
        if victim.endswith("13"):
            engine.handle(Cancel(victim))
            del open_choices[victim]
            _submit(engine, waiting, open_choices)
    assert not open_choices
    return tokens


def _submit(engine: Engine, waiting, open_choices: dict[str, int]) -> None:
    number = next(waiting, None)
    if number is not None:
        message = request(number)
        open_choices[message.request] = len(message.outputs)
        assert engine.handle(message) == []


def _end(engine: Engine, waiting, open_choices: dict[str, int], name: str) -> None:
    open_choices[name] -= 1
    if not open_choices[name]:
        del open_choices[name]
        _submit(engine, waiting, open_choices)


def resident_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found
    return int(found[1]) * 1024


def test_requests_leak_no_memory_and_do_not_slow_down(scale, record):
    count = scale.pick(96, 4000)
    config = ModelConfig(
        path=str(embedded.path("embedded")), threads=1, num_blocks=200, max_model_len=256, draft="none"
    )
    loaded = load(config)
    engine = Engine(loaded.engine_config, loaded.model_info, loaded.executor, time.monotonic)
    serve(engine, range(CONCURRENT * 2))  # From here on, buffers and the prefix cache are full.
    tokens, rates, objects, resident = [], [], [], []
    for part in np.array_split(np.arange(count), PARTS):
        started = time.process_time()
        tokens.append(serve(engine, range(int(part[0]), int(part[-1]) + 1)))
        rates.append(tokens[-1] / (time.process_time() - started))
        gc.collect()
        objects.append(len(gc.get_objects()))
        resident.append(resident_bytes())
    report = engine.report()
    record(
        requests=count,
        tokens=sum(tokens),
        prefix_hits=report.prefix_hits,
        preemptions=report.preemptions,
        tokens_per_cpu_second=[round(rate) for rate in rates],
        grown_objects=objects[-1] - objects[0],
        grown_mib=round((resident[-1] - resident[0]) / 2**20, 1),
    )
    assert report.prefix_hits > 0
    assert report.generation_tokens >= sum(tokens) > count
    assert (report.running, report.waiting, report.blocks_live) == (0, 0, 0)
    # Caches of a bounded size may grow, such as the one for trees of one node.
    assert objects[-1] - objects[0] < 2000
    assert resident[-1] - resident[0] < 16 << 20
    # Compare the median with a wide margin: other processes may make any part slow.
    assert statistics.median(rates[PARTS // 2 :]) > 0.6 * statistics.median(rates[: PARTS // 2])
