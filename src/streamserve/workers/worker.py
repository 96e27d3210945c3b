"""A worker process: one engine between a control socket and a device. Its role is prefill, decode, or
both."""

import gc
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq
from llguidance import LLTokenizer

from streamserve.baselines.speculation import parse_policy
from streamserve.engine.engine import Engine
from streamserve.engine.plan import Drafter
from streamserve.engine.ports import EnginePorts
from streamserve.engine.transport import TransferError
from streamserve.engine.worker_loop import WorkerLoop, wait_seconds
from streamserve.execution.cores import reserve_cores
from streamserve.execution.cuda.landing import KVLanding
from streamserve.execution.default_swap import with_default_swap
from streamserve.execution.drafters.ngram import NGramDrafter
from streamserve.execution.load import load
from streamserve.execution.loaded import Loaded
from streamserve.execution.memory import HostShare
from streamserve.execution.profile.draft import draft_cost
from streamserve.execution.profile.floor import floor_of
from streamserve.execution.profile.measure import load_or_measure_profile
from streamserve.execution.profile.profile import Profile, user_profiles
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    CostCurve,
    Failed,
    FromWorker,
    Ready,
    Stop,
    ToEngine,
    decode_to_worker,
    encode,
)
from streamserve.protocol.processors import usable_processors
from streamserve.protocol.reports import Report
from streamserve.protocol.transfers import CacheAddress, kv_fingerprint
from streamserve.scheduling.cost import DEFAULT_SWAP_COST, SwapCost
from streamserve.speculation.controller import Speculation, default_cost
from streamserve.text.grammar import vocabulary
from streamserve.text.tokenizer import Tokenizer
from streamserve.transfer.network import NetworkTransport
from streamserve.transfer.network_memory import NetworkMemory
from streamserve.transfer.nixl import NixlTransport
from streamserve.transfer.nixl_memory import NixlMemory
from streamserve.transfer.pools import Pools
from streamserve.transfer.shared_memory import SharedMemory, SharedMemoryTransport
from streamserve.workers.crash import write_report
from streamserve.workers.grammar_queue import GrammarQueue
from streamserve.workers.journal import StepJournal
from streamserve.workers.pinning import pin_threads
from streamserve.workers.profile_refresh import ProfileRefresher, command_of
from streamserve.workers.remote_drafter import RemoteDrafter, remote_drafter
from streamserve.workers.server_clock import to_local, to_server
from streamserve.workers.throughput_log import ThroughputLog
from streamserve.workers.tracer import Tracer

logger = logging.getLogger(__name__)

COMPILING_MILLISECONDS = 2
"""Interval at which an idle worker checks whether a grammar is compiled."""
CHECKPOINT_EXIT_STATUS = 2
CRASH_EXIT_STATUS = 70
Memory = SharedMemory | NixlMemory | NetworkMemory
Transport = SharedMemoryTransport | NixlTransport | NetworkTransport


@dataclass(frozen=True)
class _Parts:
    """The components of an engine. In a prefill or decode worker, the KV reachable by other workers is in
    `memory`, at address `cache`, and is sent by `transport`."""

    loaded: Loaded
    memory: Memory
    transport: Transport | None
    cache: CacheAddress | None
    profile: Profile | None


def run(config: WorkerConfig, journal: StepJournal) -> int:
    """Load the model and serve until a Stop message arrives; return the exit status. An exception while
    serving ends the process with a crash report."""
    with zmq.Context() as context, _connect(context, config) as socket:
        started = time.monotonic()
        try:
            parts = _load(config)
        except (CheckpointError, TransferError) as error:
            status = CHECKPOINT_EXIT_STATUS if isinstance(error, CheckpointError) else 1
            _send(socket, Failed(str(error), status))
            return status
        _run_engine(config, parts, socket, journal, started)
        parts.memory.close()
        parts.loaded.executor.close()
    return 0


def _run_engine(
    config: WorkerConfig, parts: _Parts, socket: zmq.Socket[bytes], journal: StepJournal, started: float
) -> None:
    """Serve with the loaded components until a Stop message arrives. `started`: when loading began."""
    fallback = NGramDrafter(parts.loaded.model_info.eos_token_ids)
    vocabulary_size = parts.loaded.model_info.vocab_size
    drafter = parts.loaded.drafter or remote_drafter(config, vocabulary_size, fallback)
    remote = drafter if isinstance(drafter, RemoteDrafter) else None
    if remote:
        remote.maintain()
    tracer = Tracer(time.monotonic) if config.trace else None
    engine = _engine(config, parts, drafter, tracer, journal)
    loop = WorkerLoop(engine, partial(_report, engine, remote), tracer.take if tracer else None)
    written = parts.loaded.cache.written
    journal.progress = lambda: int(written[0])
    _send(socket, _ready(parts, time.monotonic() - started))
    _send(socket, loop.report(time.monotonic()))
    gc.freeze()  # loaded objects stay: exclude them from garbage collections
    grammar_queue = GrammarQueue(parts.loaded.executor.grammars)
    try:
        refresher = ProfileRefresher(parts.loaded, parts.profile, user_profiles(), command_of(config.model))
        _serve(loop, socket, refresher, grammar_queue, config.clock_offset)
    except Exception as error:
        _crash(config, error, journal, engine)
    finally:  # its thread may wait for a step that will never come
        grammar_queue.close()
        if parts.transport:
            parts.transport.close()
    if remote:
        remote.close()


def _load(config: WorkerConfig) -> _Parts:
    """Load the model, on reserved cores if possible. A prefill or decode worker's KV is allocated in memory
    that other workers can reach. Raises CheckpointError or TransferError."""
    model, disaggregated = config.model, config.role in ("prefill", "decode")
    memory = _memory(config)
    cores = reserve_cores(model.threads or usable_processors().threads)
    make_vocabulary = partial(_vocabulary, model.path)
    cpus = cores.cpus if cores else ()
    allocate = memory.allocate if disaggregated else None
    share = HostShare(config.host_number, config.host_workers)
    loaded = load(model, make_vocabulary, cpus, share, allocate, config.weights)
    fingerprint = kv_fingerprint(
        loaded.model_info.kv_name, loaded.engine_config.block_size, loaded.draft_fingerprint
    )
    blocks = loaded.engine_config.num_blocks  # a device's cache has one more, for padding
    pools = Pools([cache.as_bytes()[:, :blocks] for cache in loaded.caches], loaded.cache.written)
    transport = _transport(config, pools, fingerprint, loaded.landing) if disaggregated else None
    if isinstance(memory, NetworkMemory) and memory.size:
        memory.serve(Pools(loaded.landing.pools) if loaded.landing else pools)
    cache = memory.address(blocks, fingerprint) if memory.size else None
    if cores:
        pin_threads(cores, loaded)
    profile = load_or_measure_profile(model.path, loaded, user_profiles()) if model.profile else None
    return _Parts(with_default_swap(loaded, model, profile), memory, transport, cache, profile)


def _memory(config: WorkerConfig) -> Memory:
    """Return the memory that receives KV."""
    if config.kv_network:
        return NetworkMemory(config.kv_network)
    return NixlMemory(config.leased) if config.kv_transport == "nixl" else SharedMemory()


def _transport(config: WorkerConfig, pools: Pools, fingerprint: str, landing: KVLanding | None) -> Transport:
    """Return the transport that sends KV. Raises TransferError if it cannot be used here."""
    limit = config.kv_bytes_per_second
    if landing and config.kv_transport == "nixl":
        raise TransferError("--kv-transport nixl does not send from a GPU's memory yet: use auto")
    if config.kv_network:
        return NetworkTransport(pools, fingerprint, config.kv_network, limit)
    if config.kv_transport == "nixl":
        return NixlTransport(pools, fingerprint, limit, machines=config.leased)
    return SharedMemoryTransport(pools, fingerprint, limit)


def _crash(config: WorkerConfig, error: Exception, journal: StepJournal, engine: Engine) -> NoReturn:
    """Report the error and exit at once: after it, nothing in this process is reliable, neither threads nor
    locks."""
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
            transport=parts.transport,
            cache=parts.cache,
            reports_prefixes=config.reports_prefixes,
            gate=None if isinstance(parts.memory, SharedMemory) else parts.memory.gate,
            landing=loaded.landing,
            floor=floor_of(loaded, profile) if profile else None,
            swap_cost=_swap_cost(loaded, profile),
            observer=tracer,
            journal=journal,
            adapters=loaded.adapters,
        ),
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
        cache=parts.cache,
        cost=_curve(parts.profile) if parts.profile else None,
        weights_shared=loaded.weights_shared,
        swap_bytes=config.swap_blocks * (loaded.kv_cache_bytes // config.num_blocks),
    )


def _curve(profile: Profile) -> CostCurve:
    """Return the measured step cost, for the choice between workers."""
    return CostCurve(kv_token_bytes=profile.kv_token_bytes, **asdict(profile.cost))


def _swap_cost(loaded: Loaded, profile: Profile | None) -> SwapCost:
    """Return the cost in seconds of swapping a number of blocks of all KV cache groups."""
    if profile is None or profile.swap is None:
        return DEFAULT_SWAP_COST
    return profile.swap.in_blocks(loaded.kv_cache_bytes // loaded.engine_config.num_blocks)


def _vocabulary(path: str, size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    return vocabulary(Tokenizer.from_folder(path), size, eos_token_ids)


def _connect(context: zmq.Context[zmq.Socket[bytes]], config: WorkerConfig) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, config.worker.encode())
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(config.endpoint)
    return socket


def _serve(
    loop: WorkerLoop,
    socket: zmq.Socket[bytes],
    refresher: ProfileRefresher,
    grammar_queue: GrammarQueue,
    clock_offset: float,
) -> None:
    """Receive messages between turns until a Stop message arrives, and send what the turns yield. The
    server's clock is `clock_offset` seconds ahead of this machine's."""
    engine = loop.engine
    throughput = ThroughputLog(engine.report(), time.monotonic())
    while True:
        longest = _wait_milliseconds(engine, grammar_queue)
        wait = refresher.wait(engine, longest)
        received = _receive(socket, wait)
        if received is None:
            return
        local = (to_local(message, clock_offset) for message in received)
        messages = [message for taken in local for message in grammar_queue.take(taken)]
        loop.begin_turn(messages + grammar_queue.ready())
        now = time.monotonic()
        for message in loop.end_turn(now, busy=wait < longest):
            _send(socket, to_server(message, clock_offset))
            if isinstance(message, Report) and (line := throughput.line(message, now)):
                logger.info(line)


def _wait_milliseconds(engine: Engine, grammar_queue: GrammarQueue) -> int:
    """Return how long to wait for messages before the next turn."""
    seconds = wait_seconds(engine.has_work, engine.stalled, engine.transfers.busy)
    wait = round(1000 * seconds)
    return min(wait, COMPILING_MILLISECONDS) if grammar_queue.waiting else wait


def _receive(socket: zmq.Socket[bytes], wait: int) -> list[ToEngine] | None:
    """Return the messages that have arrived, after at most `wait` milliseconds; None after a Stop."""
    messages: list[ToEngine] = []
    while socket.poll(wait):
        wait = 0
        try:
            message = decode_to_worker(socket.recv())
        except msgspec.DecodeError:
            logger.exception("dropped a message that cannot be decoded")
            continue
        if isinstance(message, Stop):
            return None
        messages.append(message)
    return messages


def _report(engine: Engine, remote: RemoteDrafter | None) -> Report:
    """Return the engine's report with the draft services' counters; their sessions are kept open."""
    if remote is None:
        return engine.report()
    remote.maintain()
    return msgspec.structs.replace(engine.report(), remote=remote.report())


def _send(socket: zmq.Socket[bytes], message: FromWorker) -> None:
    socket.send(encode(message))
