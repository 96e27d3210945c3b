"""A worker between two heads: its agent has lost one head, and another head may adopt the worker.

serving ── Leave ──▶ requests removed, nothing written elsewhere ── Left ──▶ waiting ── Adopt ──▶ serving
                                                                               └─ Stop, pipe closed ─▶ end
"""

import logging

from streamserve.engine.engine import Engine
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.messages import Adopt, Left, Stop
from streamserve.workers.kv_ports import KVPorts
from streamserve.workers.link import WorkerLink

logger = logging.getLogger(__name__)


def between_heads(engine: Engine, kv: KVPorts, link: WorkerLink) -> Adopt | None:
    """Leave a head and wait for the next one. Weights and the prefix cache stay.

    Returns the message of the next head, or None if this worker must end.
    """
    kv.leave()
    engine.leave()
    link.send(Left())
    logger.info("no head: this worker keeps its weights and its prefix cache for the next head")
    while True:
        message = link.receive(None)
        if isinstance(message, Adopt):
            return message
        if isinstance(message, Stop):
            return None


def join(config: WorkerConfig, engine: Engine, kv: KVPorts) -> None:
    """Join the head that sent this configuration. Raises TransferError if KV cannot be exchanged as
    configured."""
    kv.join(config)
    engine.attach(kv.transport, kv.cache, config.worker)
