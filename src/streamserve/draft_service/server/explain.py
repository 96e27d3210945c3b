"""Reports of a draft service: the model's predictions and the measurements."""

import msgspec

from streamserve.draft_service.server.service import Service
from streamserve.protocol.drafting import DraftReport, DraftSums


def report(service: Service, now: float) -> DraftReport:
    """Return the service's present state, counters and predictions."""
    statistics, keep_warm_controller = service.statistics, service.batcher.keep_warm_controller
    star, active = statistics.star(), len(service.table.active(now))
    known = statistics.known
    rounds = star.round(active) if active and known else 0.0
    return DraftReport(
        targets=len(service.sessions),
        active=active,
        waiting=sum(session.requested_at is not None for session in service.sessions.values()),
        blocks_total=service.memory.pool.size,
        blocks_used=service.memory.pool.size - service.memory.pool.free,
        evictions=service.memory.evictions,
        pass_seconds=statistics.pass_seconds,
        batch_seconds=statistics.batch_seconds.value,
        batch_variance=statistics.batch_seconds.variance,
        depth=statistics.depth.value,
        batch=statistics.batch.value,
        return_seconds=statistics.return_seconds.value,
        verify_seconds=statistics.verify.value,
        communication_seconds=statistics.communication,
        plain_seconds=statistics.plain.value,
        beta=statistics.beta,
        progress=statistics.progress,
        n_full=star.n_full if known else 0,
        n_max=service.table.n_max() if known else 0,
        predicted_round_seconds=rounds,
        predicted_idle_seconds=star.idle(active) if rounds else 0.0,
        predicted_load=star.load(active) if rounds else 0.0,
        at=now,
        cold_seconds=keep_warm_controller.cost(False),
        warm_seconds=keep_warm_controller.cost(True),
        keeping_warm=keep_warm_controller.on,
        sums=msgspec.structs.replace(
            statistics.counters,
            rebuilt=service.sequence_store.rebuilt,
            warm_passes=keep_warm_controller.passes,
            refused=dict(statistics.counters.refused),
        ),
    )


def explain(report: DraftReport, last: DraftReport | None = None) -> str:
    """Return a readable summary: measurements since `last`, and the model's predictions."""
    span = report.at - last.at if last else 0.0
    now, before = report.sums, last.sums if last else DraftSums()
    busy, idle = now.busy - before.busy, now.idle - before.idle
    requests, rounds = now.requests - before.requests, now.rounds - before.rounds
    waited = (now.waited - before.waited) / requests if requests else 0.0
    measured = (now.round_seconds - before.round_seconds) / rounds if rounds else 0.0
    per_round = idle / rounds * max(report.active, 1) if rounds else 0.0
    lines = [
        f"N = {report.active} of {report.targets} targets; {requests} requests in {span:.1f} s, "
        f"{report.batch:.1f} targets a batch",
        f"t_s = {_ms(report.pass_seconds)}  d = {report.depth:.1f}  S = {_ms(report.batch_seconds)}  "
        f"t_c = {_ms(report.communication_seconds)}  t_v = {_ms(report.verify_seconds)}  "
        f"β = {report.beta:.2f}  plain step {_ms(report.plain_seconds)}",
        f"N_full = {report.n_full}  N_max = {report.n_max}",
        f"round    predicted {_ms(report.predicted_round_seconds)}  measured {_ms(measured)}",
        f"T_idle   predicted {_ms(report.predicted_idle_seconds)}  measured {_ms(per_round)}",
        f"load     predicted {report.predicted_load:.1%}  measured {busy / span if span else 0.0:.1%}",
        f"T_wait   measured {_ms(waited)}",
        f"per level after a gap: cold {_ms(report.cold_seconds)}  warm {_ms(report.warm_seconds)}  "
        f"kept warm: {'yes' if report.keeping_warm else 'no'}",
    ]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"
