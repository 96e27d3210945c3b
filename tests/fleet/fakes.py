"""A fleet whose workers are messages that a test makes."""

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Open, Send, WorkerMessage
from streamserve.fleet.fleet import Fleet
from streamserve.protocol.messages import PROTOCOL_VERSION, Events, Ready, Submit
from streamserve.protocol.sampling import SamplingParams
from tests.engine.drive import model_info

W = "unified-0"
READY = Ready(
    version=PROTOCOL_VERSION,
    model=model_info(96),
    num_blocks=9,
    block_size=4,
    max_num_seqs=64,
    kv_cache_bytes=0,
    load_seconds=0,
)
OPEN = Open("r", [1, 2, 3], SamplingParams(seed=1, max_tokens=9))


def started(**config) -> Fleet:
    fleet = Fleet(FleetConfig(**config))
    fleet.start(0.0)
    for worker in fleet.config.topology.names:
        assert fleet.handle(WorkerMessage(worker, 1, READY), 0.0) == []
    return fleet


def send_events(fleet: Fleet, *events, worker: str = W, incarnation: int = 1):
    return fleet.handle(WorkerMessage(worker, incarnation, Events(list(events))), 1.0)


def submitted(commands) -> Submit:
    messages = [c.message for c in commands if isinstance(c, Send) and isinstance(c.message, Submit)]
    assert len(messages) == 1
    return messages[0]
