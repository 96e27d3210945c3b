"""Crash reports: the state of a worker when an exception ended it, without any text or token ids."""

import json
import logging
import os
import time
import traceback
from pathlib import Path
from typing import Any

from streamserve import __version__
from streamserve.contracts.plan import StepPlan
from streamserve.engine.engine import Engine
from streamserve.engine.sequence import EngineSequence
from streamserve.system.crashes import MAX_REPORT_BYTES, MAX_REPORTS

logger = logging.getLogger(__name__)

MAX_SEQUENCES = 512
MAX_MESSAGE = 500
"""Maximum length of the exception's message, in characters."""


def write_report(
    folder: Path, worker: str, error: BaseException, phase: str, plan: StepPlan | None, engine: Engine
) -> str:
    """Write a report and return its name; if that fails, log it and return an empty name."""
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{worker.replace('/', '-')}-{os.getpid()}.json"
    try:
        text = json.dumps(_report(worker, error, phase, plan, engine), indent=1)[:MAX_REPORT_BYTES]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        for old in sorted(folder.glob("*.json"))[:-MAX_REPORTS]:
            old.unlink(missing_ok=True)
    except Exception as failure:
        logger.warning("failed to write a crash report in %s: %s", folder, failure)
        return ""
    return name


def _report(
    worker: str, error: BaseException, phase: str, plan: StepPlan | None, engine: Engine
) -> dict[str, Any]:
    pool, sequences = engine.scheduler.tables.pool, list(engine.scheduler.sequences.values())
    return {
        "version": __version__,
        "worker": worker,
        "time": time.time(),
        "phase": phase,
        "exception": type(error).__name__,
        "message": str(error)[:MAX_MESSAGE],
        "traceback": [
            {"file": frame.filename, "line": frame.lineno, "function": frame.name, "code": frame.line}
            for frame in traceback.extract_tb(error.__traceback__)
        ],
        "plan": _plan(plan) if plan else None,
        "blocks": {"total": pool.size, "free": pool.free},
        "sequences_in_all": len(sequences),
        "sequences": [_sequence(sequence) for sequence in sequences[:MAX_SEQUENCES]],
    }


def _plan(plan: StepPlan) -> dict[str, Any]:
    return {
        "step": plan.step,
        "admitted": len(plan.admitted),
        "released": plan.released,
        "copies": len(plan.copies),
        "swap_out": len(plan.swap_out),
        "swap_in": len(plan.swap_in),
        "spans": [
            {
                "sequence": span.sequence,
                "start": span.start,
                "tokens": len(span.tokens),
                "draft_tokens": span.query_tokens - len(span.tokens),
                "blocks": len(span.blocks),
                "choices": span.choices,
                "group": span.group,
            }
            for span in plan.spans[:MAX_SEQUENCES]
        ],
    }


def _sequence(sequence: EngineSequence) -> dict[str, Any]:
    facts = {
        sequence.status.label: True,
        sequence.transfer.role.label: True,
        "open": sequence.stream.open,
        "early": sequence.submitted.answer_early,
        "has reservation": sequence.transfer.has_reservation,
        "passed over": sequence.passed_over,
        "state sent": sequence.state_sent,
    }
    return {
        "id": sequence.id,
        "request": sequence.request,
        "attempt": sequence.attempt,
        "choices": sequence.choices,
        "prompt_tokens": sequence.prompt_length,
        "tokens": len(sequence.tokens),
        "computed": sequence.kv.computed,
        "blocks": len(sequence.kv.blocks),
        "swapped": len(sequence.kv.host_blocks),
        "status": [name for name, holds in facts.items() if holds],
    }
