"""The draft role: runs draft_service/server/service.py between a socket and a draft model.

receiver and sender   one thread, which owns the sockets      listener ◀──▶ targets, DEALER ◀──▶ parent
drafting              the main thread: batch after batch, while any request waits

The threads share the service under one lock, which is not held while the model computes. They are in
workers/draft_runtime.py.
"""

import secrets
import time
from pathlib import Path

import zmq

from streamserve.draft_service.server.admission import Limits
from streamserve.draft_service.server.service import Service
from streamserve.draft_service.server.types import ServiceConfig, ServiceIdentity
from streamserve.execution.backends.native.cores import reserve_cores
from streamserve.execution.drafters.fingerprints import fingerprints
from streamserve.execution.loading.load import load, make_drafter
from streamserve.execution.loading.loaded import Loaded
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.curve import parse_endpoint, read_clients, read_key_pair
from streamserve.protocol.drafting import DraftReady, encode
from streamserve.protocol.drafting_config import DraftingConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.messages import Failed
from streamserve.system.processors import usable_processors
from streamserve.workers.draft_listener import DraftListener
from streamserve.workers.draft_runtime import ServiceRuntime
from streamserve.workers.keyed_listener import KeyedListener
from streamserve.workers.pinning import pin_threads
from streamserve.workers.plain_listener import PlainListener

BAD_SETTING_EXIT_STATUS = 2


def run(config: WorkerConfig) -> int:
    """Load the model and draft until a Stop message arrives; return the exit status."""
    assert config.drafting is not None
    with zmq.Context() as context, _parent(context, config) as parent:
        started = time.monotonic()
        cores = reserve_cores(config.model.threads or usable_processors().threads)
        try:
            loaded = load(config.model, None, cores.cpus if cores else ())
            service = make_service(config.drafting, loaded, Path(config.model.path))
            listener = listen(context, config.drafting)
        except (CheckpointError, ValueError, OSError, zmq.ZMQError) as error:
            parent.send(encode(Failed(str(error), BAD_SETTING_EXIT_STATUS)))
            return BAD_SETTING_EXIT_STATUS
        info = loaded.model_info
        parent.send(encode(DraftReady(
            address=listener.address, model=info, kv_cache_bytes=loaded.kv_cache_bytes,
            num_blocks=loaded.engine_config.num_blocks, load_seconds=time.monotonic() - started,
        )))  # fmt: skip
        drafter = make_drafter(loaded)
        runtime = ServiceRuntime(service, listener, parent, context)
        runtime.start()  # before this thread is pinned: child threads inherit the affinity
        try:
            if cores:
                pin_threads(cores, loaded)
            runtime.draft(drafter)
        finally:
            runtime.stop()
            listener.close()
            loaded.executor.close()
    return 0


def listen(context: zmq.Context[zmq.Socket[bytes]], config: DraftingConfig) -> DraftListener:
    """Listen at `config.listen`. Raises ValueError for invalid key files; OSError or ZMQError if the address
    cannot be used."""
    endpoint = parse_endpoint(config.listen)
    if config.key is None:
        return PlainListener(endpoint)
    clients = read_clients(config.clients) if config.clients else {}
    return KeyedListener(context, endpoint, read_key_pair(config.key), clients)


def make_service(config: DraftingConfig, loaded: Loaded, folder: Path) -> Service:
    """Return the service for a loaded model. Raises CheckpointError if its tokenizer cannot be read."""
    info = loaded.model_info
    tokenizer, vocabulary = fingerprints(folder, info.vocab_size)
    identity = ServiceIdentity(
        model=info.fingerprint,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
    )
    limits = Limits(
        max_sessions=config.max_targets,
        rate=config.rate,
        burst=2 * config.rate,
        total_rate=10 * config.rate,
        by_model=config.admission,
    )
    shares = {name: float(weight) for name, _, weight in (share.rpartition("=") for share in config.share)}
    service = ServiceConfig(
        num_blocks=loaded.engine_config.num_blocks,
        block_size=loaded.engine_config.block_size,
        max_batch=config.max_batch,
        max_batch_seconds=config.max_batch_ms / 1000,
        lease=config.lease,
        shares=shares,
        limits=limits,
        keep_warm=config.keep_warm,
    )
    return Service(identity, service, lambda: secrets.token_bytes(16))


def _parent(context: zmq.Context[zmq.Socket[bytes]], config: WorkerConfig) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, config.worker.encode())
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(config.endpoint)
    return socket
