"""Keeps a profile true: one that was measured unstably, or that steps contradict, is measured anew while the
worker is idle, a short step at a time."""

import logging
import shlex
import time
from collections.abc import Callable

from streamserve.engine.engine import Engine
from streamserve.execution.load import Loaded
from streamserve.execution.profile.profile import Kept, Profile
from streamserve.execution.profile.remeasure import Remeasurement, contradicts
from streamserve.protocol.config import ModelConfig

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
"""How long the worker has been idle before it measures: a client may be about to ask for more."""
FIRST_SECONDS = 30.0
"""Time before a measurement that did not help is repeated; each time twice as long."""
LONGEST_SECONDS = 3600.0


class Upkeep:
    """Asked by the worker's loop between messages, it measures a piece when that is due."""

    def __init__(
        self,
        loaded: Loaded,
        profile: Profile | None,
        kept: Kept,
        command: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loaded, self.profile, self._kept, self._command = loaded, profile, kept, command
        self._clock = clock
        self._worked = clock()
        self._begins = 0.0
        self._pause = FIRST_SECONDS
        self._measuring: Remeasurement | None = None
        if profile and not profile.stable:
            logger.info(
                "the profile of this model was measured while others computed, or its rounds differed: it is "
                "measured anew when the worker is idle (or now, on a quiet machine: %s)", command,
            )  # fmt: skip

    def wait(self, engine: Engine, milliseconds: int) -> int:
        """Measure a piece if the engine has been idle for a while and the profile is in doubt. Returns how
        long to wait for messages: not at all while there is more to measure, else `milliseconds`."""
        now = self._clock()
        if engine.has_work or engine.exchange.busy:
            self._worked = now
            return milliseconds
        if self.profile is None or now < self._begins or now - self._worked < IDLE_SECONDS:
            return milliseconds
        cost = engine.speculation.step_cost
        if self._measuring is None and self.profile.stable and not cost.contradicted:
            return milliseconds
        try:
            self._measure(self.profile, engine)
        except Exception as error:  # a profile that is wrong is better than a worker that ends
            self._stop()
            logger.warning("the model was not measured anew: %s: %s", type(error).__name__, error)
        return 0 if self._measuring else milliseconds

    def _measure(self, profile: Profile, engine: Engine) -> None:
        """A piece; after the last one the profile is kept, and used from now on."""
        if self._measuring is None:
            cost = engine.speculation.step_cost
            if cost.contradicted:
                logger.warning(
                    "steps differ from the profile by a factor of %.2f: it is measured anew while the worker "
                    "is idle (or now, on a quiet machine: %s)", cost.disagreement, self._command,
                )  # fmt: skip
            self._measuring = Remeasurement(self._loaded, self._kept, profile)
            return
        if self._measuring.disturbed:  # another is measuring now
            self._stop()
            return
        if not self._measuring.piece():
            return
        found = self._measuring.profile()
        self._stop()
        if found.stable or not profile.stable:
            path = self._kept.write(found)
            engine.speculation.step_cost.replace_prior(found.cost.in_tokens(found.kv_token_bytes))
            self.profile = found
            changed = "another" if contradicts(profile, found) else "about the same"
            logger.info("measured anew, %s: %s; kept in %s", changed, found.summary, path)

    def _stop(self) -> None:
        """Free what was measured on, and pause."""
        self._measuring = None
        self._begins = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_SECONDS)


def command_of(model: ModelConfig) -> str:
    """The command that measures this model's profile in full."""
    words = ["streamserve", "profile", model.path]
    words += ["--dtype", model.dtype] if model.dtype != "auto" else []
    words += ["--backend", model.backend] if model.backend != "auto" else []
    words += ["--threads", str(model.threads)] if model.threads else []
    return shlex.join(words)
