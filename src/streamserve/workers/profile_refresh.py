"""Refreshes a profile that was measured unstably, or that step times contradict.

The profile is measured again while the worker is idle, one short step at a time.
"""

import logging
import shlex
import time
from collections.abc import Callable

from streamserve.engine.engine import Engine
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.profile.profile import Profile, ProfileStore
from streamserve.execution.profile.remeasure import Remeasurement, contradicts
from streamserve.protocol.config import ModelConfig

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
"""Idle seconds before a measurement begins, since a client may be about to send more requests."""
FIRST_SECONDS = 30.0
"""Seconds before an unsuccessful measurement is repeated, doubled each time."""
LONGEST_SECONDS = 3600.0


class ProfileRefresher:
    """Measures one piece of the profile when it is due; called by the worker's loop between messages."""

    def __init__(
        self,
        loaded: Loaded,
        profile: Profile | None,
        store: ProfileStore,
        command: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loaded, self.profile, self._store, self._command = loaded, profile, store, command
        self._clock = clock
        self._worked = clock()
        self._begins = 0.0
        self._pause = FIRST_SECONDS
        self._measuring: Remeasurement | None = None
        if profile and not profile.stable:
            logger.debug(
                "the profile of this model was measured while other processes were busy, or its rounds "
                "differed: it is measured again when the worker is idle (or now, on a quiet machine: %s)",
                command,
            )  # fmt: skip

    def wait(self, engine: Engine, milliseconds: int) -> int:
        """Measure a piece if the engine has been idle for `IDLE_SECONDS` and the profile is in doubt.

        Returns how many milliseconds to wait for messages: 0 while there is more to measure, else
        `milliseconds`.
        """
        now = self._clock()
        if engine.has_work or engine.transfers.busy:
            self._worked = now
            return milliseconds
        if self.profile is None or now < self._begins or now - self._worked < IDLE_SECONDS:
            return milliseconds
        cost = engine.speculation.step_cost
        if self._measuring is None and self.profile.stable and not cost.contradicted:
            return milliseconds
        try:
            self._measure(self.profile, engine)
        except Exception as error:  # a wrong profile is better than a dead worker
            self._stop()
            logger.warning("the profile was not measured again: %s: %s", type(error).__name__, error)
        return 0 if self._measuring else milliseconds

    def _measure(self, profile: Profile, engine: Engine) -> None:
        """Measure a piece; after the last piece, store the profile and use it from now on."""
        if self._measuring is None:
            cost = engine.speculation.step_cost
            if cost.contradicted:
                logger.warning(
                    "steps differ from the profile by a factor of %.2f: it is measured again while the "
                    "worker is idle (or now, on a quiet machine: %s)", cost.disagreement, self._command,
                )  # fmt: skip
            self._measuring = Remeasurement(self._loaded, self._store, profile)
            return
        if self._measuring.disturbed:  # another process is measuring now
            self._stop()
            return
        if not self._measuring.piece():
            return
        measured = self._measuring.profile()
        self._stop()
        if measured.stable or not profile.stable:
            path = self._store.write(measured)
            engine.speculation.step_cost.replace_prior(measured.cost.in_tokens(measured.kv_token_bytes))
            self.profile = measured
            changed = "changed" if contradicts(profile, measured) else "almost unchanged"
            logger.debug("measured again, %s: %s; stored in %s", changed, measured.summary, path)

    def _stop(self) -> None:
        """Free the measurement's buffers, and pause."""
        self._measuring = None
        self._begins = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_SECONDS)


def command_of(model: ModelConfig) -> str:
    """Return the command that measures this model's profile in full."""
    words = ["streamserve", "profile", model.path]
    words += ["--dtype", model.dtype] if model.dtype != "auto" else []
    words += ["--backend", model.backend] if model.backend != "auto" else []
    words += ["--kernel-path", model.kernel_path] if model.kernel_path != "auto" else []
    words += ["--numerics", model.numerics] if model.numerics != "auto" else []
    words += ["--quantization", model.quantization] if model.quantization != "none" else []
    words += ["--head-quantization", model.head_quantization] if model.head_quantization != "auto" else []
    words += ["--kv-cache-dtype", model.kv_cache_dtype] if model.kv_cache_dtype != "auto" else []
    words += ["--threads", str(model.threads)] if model.threads else []
    return shlex.join(words)
