"""Launch and finish steps in the executor, and measure their seconds. If the executor allows it, the next
step is launched before the results of the running one are known."""

from collections.abc import Callable, Sequence

from streamserve.contracts.cost import SwapCost
from streamserve.contracts.plan import AsyncExecutor, Executor, Span, StepPlan, StepResult
from streamserve.engine.ahead import Flight, plan_ahead
from streamserve.engine.invariants import check_plan
from streamserve.engine.kv_transfer import KVTransferManager
from streamserve.engine.observer import Journal, Observer, StepPhase
from streamserve.engine.scheduler import Scheduler
from streamserve.speculation.controller import NO_CANDIDATES, Speculation
from streamserve.speculation.learned_cost import RefinedCost


class StepPipeline:
    """The steps that an executor runs. An `AsyncExecutor` has up to two launched steps at a time:

        next()         returns the step that was launched ahead; None: the caller plans one
        start(flight)  launches it, and the step after it too if that is known already
        finish(flight) returns its results

    An executor that is not asynchronous runs a step in `finish`.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        transfers: KVTransferManager,
        clock: Callable[[], float],
        observer: Observer,
        journal: Journal,
        swap_cost: SwapCost,
    ) -> None:
        self._executor = executor
        self._async_executor = executor if isinstance(executor, AsyncExecutor) else None
        self._scheduler = scheduler
        self._transfers = transfers
        self._clock = clock
        self._observer = observer
        self._journal = journal
        self._swap_cost = swap_cost
        self._ahead: Flight | None = None
        """The step that was launched ahead and that `next` has not returned yet."""
        self._launched_at = self._next_launched_at = self._finished_at = 0.0
        self._decoded: set[int] = set()
        """Ids of the last step's sequences, if all of them decoded; otherwise empty."""
        self.interval: float | None = None
        """Seconds between the ends of the last two steps, if both had only decoding sequences, and the later
        step only sequences of the earlier step; otherwise None."""
        self.steps_ahead = 0
        self.computing_seconds = 0.0
        """Total seconds of the finished steps."""

    @property
    def asynchronous(self) -> bool:
        """Whether the engine can do other work while a step runs."""
        return self._async_executor is not None

    @property
    def running(self) -> bool:
        """Whether a step was launched ahead and is not finished."""
        return self._ahead is not None

    @property
    def can_follow(self) -> bool:
        """Whether a launch may now take the tokens of the step launched last from the device."""
        return bool(
            self._async_executor and self._async_executor.can_follow() and not self._transfers.enabled
        )

    def next(self) -> Flight | None:
        """Return the step that was launched ahead, which the caller must start and finish next; None if there
        is none."""
        flight, self._ahead = self._ahead, None
        return flight

    def start(self, flight: Flight, speculation: Speculation, limit: int) -> None:
        """Launch a step, unless it was launched ahead. Also launch the step after it, if that is known
        already and at most `limit` steps in a row were launched ahead."""
        if self._async_executor is None:
            return
        if not flight.ahead:
            self._enter([flight], speculation.step_cost)
            self._launched_at = self._clock()
            self._async_executor.launch(flight.plan)
        if self.can_follow:
            self._ahead = self._launch_ahead(self._async_executor, flight, speculation, limit)
        # The journal still names the step before this one, which has ended: its sequences are no suspects.
        if flight.ahead and self._ahead is None:
            self._enter([flight], speculation.step_cost)

    def _launch_ahead(
        self, executor: AsyncExecutor, flight: Flight, speculation: Speculation, limit: int
    ) -> Flight | None:
        began = self._clock()
        planned = plan_ahead(flight, self._scheduler, limit)
        if planned is None:
            return None
        plan, members = planned
        if self._scheduler.config.check:
            check_plan(plan, self._scheduler)
        round = speculation.begin(NO_CANDIDATES)
        following = Flight(plan, round, [], members, began, flight.ahead + 1)
        self._enter([flight, following], speculation.step_cost)
        self._next_launched_at = self._clock()
        executor.launch(plan)
        self.steps_ahead += 1
        return following

    def finish(
        self, flight: Flight, cost: RefinedCost, drafted: Callable[[], float] = lambda: 0.0
    ) -> tuple[StepResult, float]:
        """Wait for a step, or execute it; return its results and its seconds. `cost` predicts the seconds for
        the journal; `drafted` returns when drafting for the step ended."""
        plan = flight.plan
        if plan.swap_out or plan.swap_in:
            self._observer.on_event("swap")
        if self._async_executor:
            result = self._async_executor.finish()
        else:
            self._enter([flight], cost)
            self._launched_at = self._clock()
            result = self._executor.run(plan)
        # A step that was launched while another one ran, or while the device drafted, began when that ended.
        ended = self._clock()
        spent = max(0.0, ended - max(self._launched_at, self._finished_at, drafted()))
        spent = spent if result.seconds is None else result.seconds
        self.interval = ended - self._finished_at if self._goes_on(plan) else None
        self._finished_at = ended
        self._launched_at, self._next_launched_at = self._next_launched_at, 0.0
        self.computing_seconds += spent
        return result, spent

    def _goes_on(self, plan: StepPlan) -> bool:
        """Record the sequences of a step that has ended; returns whether all of them decoded in it and in the
        step before it."""
        before, decoding = self._decoded, bool(plan.spans) and all(map(_decodes, plan.spans))
        self._decoded = {span.sequence for span in plan.spans} if decoding else set()
        return decoding and before >= self._decoded

    def _enter(self, flights: Sequence[Flight], cost: RefinedCost) -> None:
        """Record in the journal the sequences that the launched steps compute, copy or send from now on, and
        the predicted seconds of these steps and of their copies."""
        plan, live = flights[0].plan, self._scheduler.sequences
        members = {sequence.id: sequence for flight in flights for sequence in flight.members}
        members |= {id: live[id] for id in self._scheduler.swap.moving if id in live}
        phase: StepPhase = "run"
        if plan.swap_out or plan.swap_in:
            phase = "swap"
        elif any(span.tree is not None and len(span.tree.tokens) > 1 for span in plan.spans):
            phase = "verify"
        predicted = sum(cost(flight.query_tokens, flight.kv_tokens) for flight in flights)
        predicted += self._swap_cost.out(len(plan.swap_out)) + self._swap_cost.back(len(plan.swap_in))
        self._journal.enter(phase, [*members.values(), *self._transfers.moving()], predicted, plan)


def _decodes(span: Span) -> bool:
    """Whether a span has one committed token, its sequence's last, and perhaps draft tokens."""
    return span.tree is not None and len(span.tokens) == 1
