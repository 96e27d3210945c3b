"""Random settings and workloads in virtual time: thousands of trials a minute, every step checked."""

from streamserve.engine.invariants import InvariantError
from tests.campaigns.outcome import DEATH, HANG, WRONG_TEXT, Outcome
from tests.simulate import settings_fuzz


def trial(seed: int) -> Outcome:
    """Run one simulated server to its end."""
    try:
        tally = settings_fuzz.trial(seed)
    except InvariantError as error:
        return Outcome(verdict="failed", kind=DEATH, detail=f"{error}")
    except AssertionError as error:
        kind = HANG if "has no end" in str(error) else WRONG_TEXT
        return Outcome(verdict="failed", kind=kind, detail=f"{error}"[:500])
    except Exception as error:
        return Outcome(verdict="failed", kind=DEATH, detail=f"{type(error).__name__}: {error}"[:500])
    return Outcome(verdict="passed", counts=vars(tally))
