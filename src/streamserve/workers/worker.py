"""A worker process: one engine between a control socket and a device. Its role is prefill, decode, or
both."""

import gc
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import zmq
from llguidance import LLTokenizer
from msgspec.structs import replace

from streamserve.baselines.orders import ORDERS
from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.cost import DEFAULT_SWAP_COST, SwapCost
from streamserve.contracts.plan import Drafter
from streamserve.contracts.transport import TransferError
from streamserve.engine.engine import Engine
from streamserve.engine.ports import EnginePorts
from streamserve.engine.worker_loop import WorkerLoop
from streamserve.execution.backends.native.cores import reserve_cores
from streamserve.execution.compute.memory import HostShare, is_out_of_memory, out_of_memory_text
from streamserve.execution.drafters.ngram import NGramDrafter
from streamserve.execution.loading.load import load
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.profile.default_swap import with_default_swap
from streamserve.execution.profile.draft import draft_cost
from streamserve.execution.profile.floor import floor_of
from streamserve.execution.profile.measure import load_or_measure_profile
from streamserve.execution.profile.profile import Profile, user_profiles
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.errors import CheckpointError, OtherModelError
from streamserve.protocol.messages import (
    PROTOCOL_VERSION,
    Failed,
    Ready,
)
from streamserve.protocol.reports import Report
from streamserve.protocol.transfers import kv_fingerprint
from streamserve.speculation.controller import Speculation, default_cost
from streamserve.system.logs import configure_logging
from streamserve.system.processors import usable_processors
from streamserve.text.grammar import vocabulary
from streamserve.text.tokenizer import Tokenizer
from streamserve.transfer.pools import Pools
from streamserve.workers.crash import write_report
from streamserve.workers.grammar_queue import GrammarQueue
from streamserve.workers.heads import between_heads, join
from streamserve.workers.journal import Signs, StepJournal
from streamserve.workers.kv_ports import KVPorts, memory_of
from streamserve.workers.link import WorkerLink
from streamserve.workers.output_keeper import OutputKeeper
from streamserve.workers.pinning import pin_threads
from streamserve.workers.profile_refresh import ProfileRefresher, command_of
from streamserve.workers.remote_drafter import RemoteDrafter, remote_drafter
from streamserve.workers.serving import Serving, serve
from streamserve.workers.signs import signs_of
from streamserve.workers.tracer import Tracer

logger = logging.getLogger(__name__)

CHECKPOINT_EXIT_STATUS = 2
CRASH_EXIT_STATUS = 70


@dataclass(frozen=True)
class _Parts:
    """The components of an engine. A prefill or decode worker exchanges KV through its ports `kv`."""

    loaded: Loaded
    kv: KVPorts
    profile: Profile | None


def run(config: WorkerConfig, journal: StepJournal) -> int:
    """Load the model and serve until a Stop message arrives; return the exit status.

    An exception while serving ends the process with a crash report.
    """
    with zmq.Context() as context:
        with WorkerLink(context, config) as link:
            started = time.monotonic()
            try:
                parts = _load(config)
            except (CheckpointError, TransferError) as error:
                status = CHECKPOINT_EXIT_STATUS if isinstance(error, CheckpointError) else 1
                link.send(Failed(str(error), status, isinstance(error, OtherModelError)))
                return status
            except (MemoryError, OSError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                link.send(Failed(out_of_memory_text(), 1))
                return 1
            _run_engine(config, parts, link, journal, started)
        journal.signs = Signs()  # the model's signs cannot be read once it is closed
        parts.kv.memory.close()
        parts.loaded.executor.close()
    return 0


def _run_engine(
    config: WorkerConfig, parts: _Parts, link: WorkerLink, journal: StepJournal, started: float
) -> None:
    """Serve with the loaded components until a Stop message arrives, one head after another.

    `started` is the time when loading began.
    """
    fallback = NGramDrafter(parts.loaded.model_info.eos_token_ids)
    vocabulary_size = parts.loaded.model_info.vocab_size
    drafter = parts.loaded.drafter or remote_drafter(config, vocabulary_size, fallback)
    remote = drafter if isinstance(drafter, RemoteDrafter) else None
    if remote:
        remote.maintain()
    tracer = Tracer(time.monotonic) if config.trace else None
    engine = _engine(config, parts, drafter, tracer, journal)
    loop = WorkerLoop(engine, partial(_report, engine, remote), tracer.pop if tracer else None)
    journal.signs = signs_of(parts.loaded, measured=parts.profile is not None)
    ready = _ready(parts, time.monotonic() - started)
    link.send(ready)
    link.send(loop.report(time.monotonic()))
    gc.freeze()  # loaded objects stay: exclude them from garbage collections
    outputs = OutputKeeper()
    serving = Serving(loop, outputs, GrammarQueue(parts.loaded.executor.grammars), config.clock_offset)
    try:
        refresher = ProfileRefresher(parts.loaded, parts.profile, user_profiles(), command_of(config.model))
        while serve(serving, link, refresher) and parts.kv.can_leave:
            adopt = between_heads(engine, parts.kv, link)
            if adopt is None:
                break
            config, asked = adopt.config, time.monotonic()
            configure_logging(config.log_level, config.log_format, config.worker)
            serving.grammar_queue.close()
            if tracer:
                tracer.pop()
            grammar_queue = GrammarQueue(parts.loaded.executor.grammars)
            serving = Serving(loop, outputs, grammar_queue, config.clock_offset, adopt.closed)
            join(config, engine, parts.kv)
            for kept in outputs.messages(ready.model.kv_name):
                link.send(kept)
            seconds = time.monotonic() - asked
            link.send(replace(ready, cache=parts.kv.cache, load_seconds=seconds, adopted=True))
            link.send(loop.report(time.monotonic()))
    except Exception as error:
        _crash(config, error, journal, engine)
    finally:  # a transport's thread may wait for a step that will never come
        serving.grammar_queue.close()
        parts.kv.close()
    if remote:
        remote.close()


def _load(config: WorkerConfig) -> _Parts:
    """Load the model, on reserved cores if possible.

    A prefill or decode worker's KV is allocated in memory that other workers can reach. Raises
    CheckpointError or TransferError.
    """
    model, disaggregated = config.model, config.role in ("prefill", "decode")
    memory = memory_of(config)
    cores = reserve_cores(model.threads or usable_processors().threads)
    make_vocabulary = partial(_vocabulary, model.path)
    cpus = cores.cpus if cores else ()
    allocate = memory.allocate if disaggregated else None
    share = HostShare(config.host_number, config.host_workers)
    loaded = load(model, make_vocabulary, cpus, share, allocate, config.weights, config.expected)
    fingerprint = kv_fingerprint(
        loaded.model_info.kv_name, loaded.engine_config.block_size, loaded.draft_fingerprint
    )
    blocks = loaded.engine_config.num_blocks  # a device's cache has one more block, for padding
    pools = Pools([cache.as_bytes()[:, :blocks] for cache in loaded.caches], loaded.cache.written)
    kv = KVPorts(memory, pools, fingerprint, loaded.landing)
    kv.open(config, sends=disaggregated)
    if cores:
        pin_threads(cores, loaded)
    profile = load_or_measure_profile(model.path, loaded, user_profiles()) if model.profile else None
    return _Parts(with_default_swap(loaded, model, profile), kv, profile)


def _crash(config: WorkerConfig, error: Exception, journal: StepJournal, engine: Engine) -> NoReturn:
    """Report the error and exit at once.

    After the error, nothing in this process is reliable, neither threads nor locks.
    """
    reason = f"{type(error).__name__} in phase {journal.phase or 'none'}"
    folder = Path(config.crash_folder)
    name = ""
    if config.crash_folder:
        name = write_report(folder, config.worker, error, journal.phase, journal.plan, engine)
    journal.say(reason, name)
    where = f"; crash report: {folder / name}" if name else ""
    logger.critical("%s: this worker exits%s", reason, where, exc_info=error)
    logging.shutdown()
    os._exit(CRASH_EXIT_STATUS)


def _engine(
    config: WorkerConfig,
    parts: _Parts,
    drafter: Drafter | None,
    tracer: Tracer | None,
    journal: StepJournal,
) -> Engine:
    loaded, profile = parts.loaded, parts.profile
    cost = profile.cost.in_tokens(profile.kv_token_bytes) if profile else default_cost
    return Engine(
        loaded.engine_config,
        loaded.model_info,
        loaded.executor,
        time.monotonic,
        drafter,
        Speculation(
            parse_policy(config.model.speculation_policy), cost, draft_cost(loaded) if profile else None
        ),
        EnginePorts(
            name=config.worker,
            transport=parts.kv.transport,
            cache=parts.kv.cache,
            reports_prefixes=config.reports_prefixes,
            gate=parts.kv.gate,
            landing=loaded.landing,
            floor=floor_of(loaded, profile) if profile else None,
            swap_cost=_swap_cost(loaded, profile),
            observer=tracer,
            journal=journal,
            adapters=loaded.adapters,
        ),
        ORDERS,
    )


def _ready(parts: _Parts, seconds: float) -> Ready:
    """Return the message that describes the worker, after a load of `seconds` seconds."""
    loaded, config = parts.loaded, parts.loaded.engine_config
    return Ready(
        version=PROTOCOL_VERSION,
        model=loaded.model_info,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        kv_cache_bytes=loaded.kv_cache_bytes,
        load_seconds=seconds,
        draft=loaded.draft_fingerprint,
        cache=parts.kv.cache,
        cost=parts.profile.cost if parts.profile else None,
        kv_token_bytes=parts.profile.kv_token_bytes if parts.profile else 1,
        weights_shared=loaded.weights_shared,
        swap_bytes=config.swap_blocks * (loaded.kv_cache_bytes // config.num_blocks),
    )


def _swap_cost(loaded: Loaded, profile: Profile | None) -> SwapCost:
    """Return the cost in seconds of swapping a number of blocks of all KV cache groups."""
    if profile is None or profile.swap is None:
        return DEFAULT_SWAP_COST
    return profile.swap.in_blocks(loaded.kv_cache_bytes // loaded.engine_config.num_blocks)


def _vocabulary(path: str, size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    return vocabulary(Tokenizer.from_folder(path), size, eos_token_ids)


def _report(engine: Engine, remote: RemoteDrafter | None) -> Report:
    """Return the engine's report with the draft services' counters, and keep the sessions open."""
    if remote is None:
        return engine.report()
    remote.maintain()
    return replace(engine.report(), remote=remote.report())
