"""Writes a periodic log line: the engine's recent throughput, and the step floor's share of the step time."""

from streamserve.protocol.reports import Report

SECONDS = 60.0


class ThroughputLog:
    """Compares the reports of a worker once a minute."""

    def __init__(self, report: Report, now: float) -> None:
        self._last = report
        self._since = now

    def line(self, report: Report, now: float) -> str | None:
        """Return the line for the time since the last line.

        None before a minute has passed, and if the engine has made no steps since.
        """
        if now - self._since < SECONDS:
            return None
        last, self._last, self._since = self._last, report, now
        steps, busy = report.steps - last.steps, report.step_seconds - last.step_seconds
        if not steps or busy <= 0:
            return None
        generated = report.generation_tokens - last.generation_tokens
        prompt = report.prompt_tokens - last.prompt_tokens
        text = f"{steps} steps in {busy:.1f} s: {generated / busy:.0f} tokens/s, {prompt} prompt tokens"
        if report.step_floor_seconds is None or last.step_floor_seconds is None:
            return text
        return (
            f"{text}, step floor at {(report.step_floor_seconds - last.step_floor_seconds) / busy:.0%} "
            "of step time"
        )
