"""A worker: one engine between a socket and a device. Its role says whether it does prefill, decode, or
both."""

import gc
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import msgspec
import zmq
from llguidance import LLTokenizer

from streamserve.engine.engine import Engine
from streamserve.engine.speculation import Speculation, guessed_cost
from streamserve.engine.transfer import TransferError
from streamserve.execution.cores import claim
from streamserve.execution.drafters.ngram import NGramDrafter
from streamserve.execution.load import Loaded, load
from streamserve.execution.profile import Profile, users_profiles
from streamserve.execution.profile_draft import draft_cost
from streamserve.execution.profile_floor import floor_of
from streamserve.execution.profile_measure import first_profile
from streamserve.policy.cost import SwapCost
from streamserve.policy.eviction import GUESSED_SWAP
from streamserve.policy.speculation import parse_policy
from streamserve.protocol.config import KVTransport, WorkerConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    CostCurve,
    Event,
    Events,
    Failed,
    FromWorker,
    Ready,
    Report,
    Stop,
    Traced,
    Transfers,
    decode_to_worker,
    encode,
)
from streamserve.protocol.tickets import kv_fingerprint
from streamserve.text.grammar import vocabulary
from streamserve.text.tokenizer import Tokenizer
from streamserve.transfer.nixl import NixlMemory, NixlTransport
from streamserve.transfer.pools import Pools
from streamserve.transfer.shared_memory import SharedMemory, SharedMemoryTransport
from streamserve.workers.pace import Pace
from streamserve.workers.placing import settle
from streamserve.workers.remote import RemoteDrafter, remote_drafter
from streamserve.workers.tracer import Tracer

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.5
STALLED_MILLISECONDS = 10
"""How long to wait for messages before looking again whether there is memory for who waits for it."""
TRANSFER_MILLISECONDS = 1
"""How often an idle worker looks whether KV has landed."""
CHECKPOINT_EXIT_STATUS = 2
Memory = type[SharedMemory] | type[NixlMemory]
Transport = type[SharedMemoryTransport] | type[NixlTransport]
TRANSPORTS: dict[KVTransport, tuple[Memory, Transport]] = {
    "shm": (SharedMemory, SharedMemoryTransport),
    "nixl": (NixlMemory, NixlTransport),
}
"""What KV comes into, and what it leaves by."""


def run(config: WorkerConfig) -> int:
    """Load the model and serve until told to stop; returns the exit status."""
    with zmq.Context() as context, _connect(context, config) as socket:
        started = time.monotonic()
        make_memory, make_transport = TRANSPORTS[config.kv_transport]
        memory = make_memory()
        cores = claim(config.model.threads or len(os.sched_getaffinity(0)))
        numbers = cores.numbers if cores else ()
        try:
            words = partial(_vocabulary, config.model.path)
            half = config.role in ("prefill", "decode")
            loaded = load(
                config.model, words, numbers, config.memory_share, memory.allocate if half else None
            )
            fingerprint = kv_fingerprint(
                loaded.model_info.fingerprint, loaded.engine_config.block_size, loaded.draft_fingerprint
            )
            pools = Pools([cache.as_bytes() for cache in loaded.caches], loaded.cache.written)
            transport = make_transport(pools, fingerprint, config.kv_bytes_per_second) if half else None
        except CheckpointError as error:
            _send(socket, Failed(str(error), CHECKPOINT_EXIT_STATUS))
            return CHECKPOINT_EXIT_STATUS
        except TransferError as error:
            _send(socket, Failed(str(error), 1))
            return 1
        stand_in = NGramDrafter(loaded.model_info.eos_token_ids)
        drafter = loaded.drafter or remote_drafter(config, loaded.model_info.vocab_size, stand_in)
        remote = drafter if isinstance(drafter, RemoteDrafter) else None
        if remote:
            remote.attend()
        if cores:
            settle(cores, loaded)
        profile = first_profile(config.model.path, loaded, users_profiles()) if config.model.profile else None
        cost = profile.cost.in_tokens(profile.kv_token_bytes) if profile else guessed_cost
        draft = draft_cost(loaded) if profile else None
        speculation = Speculation(parse_policy(config.model.speculation_policy), cost, draft)
        tracer = Tracer(time.monotonic) if config.trace else None
        cache = memory.address(loaded.engine_config.num_blocks, fingerprint) if memory.size else None
        engine = Engine(
            loaded.engine_config,
            loaded.model_info,
            loaded.executor,
            time.monotonic,
            drafter,
            speculation,
            floor=floor_of(loaded, profile) if profile else None,
            swap_cost=_swap_cost(loaded, profile),
            transport=transport,
            cache=cache,
            name=config.worker,
            watch=tracer,
        )
        _send(
            socket,
            Ready(
                version=PROTOCOL_VERSION,
                model=loaded.model_info,
                num_blocks=loaded.engine_config.num_blocks,
                block_size=loaded.engine_config.block_size,
                max_num_seqs=loaded.engine_config.max_num_seqs,
                kv_cache_bytes=loaded.kv_cache_bytes,
                load_seconds=time.monotonic() - started,
                draft=loaded.draft_fingerprint,
                cache=cache,
                cost=_curve(profile) if profile else None,
            ),
        )
        _send(socket, _report(engine, remote))
        gc.freeze()  # what was loaded stays: collections need not look at it
        try:
            _serve(engine, socket, tracer, remote)
        finally:  # its thread may wait for a step that will never come
            if transport:
                transport.close()
        if remote:
            remote.close()
        memory.close()
        loaded.executor.close()
    return 0


def _curve(profile: Profile) -> CostCurve:
    """The measured cost of a step, for who must choose between workers."""
    return CostCurve(kv_token_bytes=profile.kv_token_bytes, **asdict(profile.cost))


def _swap_cost(loaded: Loaded, profile: Profile | None) -> SwapCost:
    """Seconds of swapping so many blocks, of all planes."""
    if profile is None or profile.swap is None:
        return GUESSED_SWAP
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
    engine: Engine, socket: zmq.Socket[bytes], tracer: Tracer | None, remote: RemoteDrafter | None
) -> None:
    """Take messages between steps, step while there is work, report twice a second."""
    reported = time.monotonic()
    pace = Pace(engine.report(), reported)
    while True:
        events: list[Event] = []
        wait = TRANSFER_MILLISECONDS if engine.exchange.busy else int(REPORT_SECONDS * 1000)
        if engine.has_work:
            wait = min(wait, STALLED_MILLISECONDS) if engine.stalled else 0
        while socket.poll(wait):
            try:
                message = decode_to_worker(socket.recv())
            except msgspec.DecodeError:
                logger.exception("dropped a message that cannot be read")
                continue
            if isinstance(message, Stop):
                return
            events += engine.handle(message)
            wait = 0
        if engine.has_work:
            events += engine.step()
        news = engine.exchange.news()
        if tracer and (work := tracer.take()):
            _send(socket, Traced(work))
        if events:
            _send(socket, Events(events))
        if cached := engine.cache_news():
            _send(socket, cached)
        if news:
            _send(socket, Transfers(news))
        now = time.monotonic()
        if now - reported >= REPORT_SECONDS or not engine.has_work:
            reported = now
            if remote:
                remote.attend()
            report = _report(engine, remote)
            _send(socket, report)
            if line := pace.line(report, now):
                logger.info(line)


def _report(engine: Engine, remote: RemoteDrafter | None) -> Report:
    report = engine.report()
    return msgspec.structs.replace(report, remote=remote.report()) if remote else report


def _send(socket: zmq.Socket[bytes], message: FromWorker) -> None:
    socket.send(encode(message))
