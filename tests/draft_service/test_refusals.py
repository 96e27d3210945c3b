"""Every refusal is counted once under its reason, and tells the target when to retry."""

from streamserve.draft_service.server.audit import Audit
from streamserve.draft_service.server.refusals import Refusals
from streamserve.draft_service.server.sessions import Account, Session
from streamserve.draft_service.server.statistics import Statistics
from streamserve.draft_service.server.types import TargetReply
from streamserve.protocol.drafting import Busy, Refused

SESSION = Session(7, b"channel", b"peer", "", "target", Account(), 0.0, 0.0)


def test_each_refusal_is_counted_by_its_reason() -> None:
    statistics = Statistics()
    refusals = Refusals(statistics, Audit(), 1.5)
    assert refusals.refuse(b"peer", "size", "too long", 0.0, 3) == TargetReply(
        b"peer", Refused(3, "size", "too long")
    )
    assert refusals.turn_away("targets", "target 'x'", 0.0, 4) == Busy(4, 0, 1.5, "targets")
    assert refusals.wait(SESSION, "memory", 0.0) == Busy(0, 7, 1.5, "memory")
    assert refusals.wait(SESSION, "memory", 0.0, 9.0) == Busy(0, 7, 9.0, "memory"), "a better time is known"
    assert statistics.counters.refused == {"size": 1, "targets": 1, "memory": 2}
