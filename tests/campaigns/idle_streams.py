"""Engines in virtual time in which prompt streams lie idle: thousands of trials an hour, every step
checked."""

from streamserve.engine.invariants import InvariantError
from tests.campaigns.outcome import DEATH, HANG, WRONG_TEXT, Outcome
from tests.simulate import idle_streams


def trial(seed: int) -> Outcome:
    """Run one engine to its end."""
    try:
        count = idle_streams.trial(seed)
    except InvariantError as error:
        return Outcome(verdict="failed", kind=DEATH, detail=f"{error}"[:500])
    except AssertionError as error:
        kind = HANG if "not done" in str(error) or "no end" in str(error) else WRONG_TEXT
        return Outcome(verdict="failed", kind=kind, detail=f"{error}"[:500])
    except Exception as error:
        return Outcome(verdict="failed", kind=DEATH, detail=f"{type(error).__name__}: {error}"[:500])
    worst = {"percent of the bound": float(count.pop("percent_of_bound"))}
    return Outcome(verdict="passed", counts=dict(count), worst=worst)
