"""The engine: handles requests, edits and cancellations, and generates tokens step by step."""

from collections.abc import Callable, Mapping
from itertools import compress, repeat

from msgspec.structs import replace

from streamserve.contracts.cost import CostModel
from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import DRAFT, Drafter, Executor, StepResult
from streamserve.contracts.transport import Transport
from streamserve.engine.adapters import AdapterManager
from streamserve.engine.ahead import MAX_AHEAD, Flight
from streamserve.engine.batch import RunningAverages, batch_candidates, workload
from streamserve.engine.commit import StepCommitter, admissions
from streamserve.engine.drafting import Drafting
from streamserve.engine.invariants import check_advance, check_plan, check_state
from streamserve.engine.kv_transfer import make_transfers
from streamserve.engine.learning import StepLearning
from streamserve.engine.observer import Journal, Observer
from streamserve.engine.pipeline import StepPipeline
from streamserve.engine.ports import NO_PORTS, EnginePorts
from streamserve.engine.progress import Standstill
from streamserve.engine.prompt_edits import StreamEdits
from streamserve.engine.scheduler import Scheduler
from streamserve.engine.sequence import EngineSequence
from streamserve.engine.status import TransferRole
from streamserve.engine.validation import (
    final_events,
    infeasible_events,
    make_sequence,
    may_be_infeasible,
    refusal,
)
from streamserve.protocol.messages import (
    Cached,
    Cancel,
    Edit,
    Event,
    Finished,
    LoadAdapter,
    ModelInfo,
    RequestKind,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from streamserve.protocol.reports import Report, StepParts
from streamserve.protocol.transfers import CacheAddress, Hold, Join, Push, Release
from streamserve.scheduling.ordering import DEFAULT_ORDERS, Order
from streamserve.scheduling.prefix import root_hash
from streamserve.speculation.controller import Speculation, default_cost
from streamserve.speculation.policies import GOODPUT


class Engine:
    """One worker's engine. Not thread-safe: messages are handled between steps. A message that arrives while
    a step runs is handled when that step has been committed.

    * `clock` returns seconds: real time in a worker, virtual time in a simulation.
    * `speculation` decides about draft tokens.
    * `ports`: optional connections.
    * `orders`: the orders of service by name, one of which `config.order` names.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelInfo,
        executor: Executor,
        clock: Callable[[], float],
        drafter: Drafter | None = None,
        speculation: Speculation | None = None,
        ports: EnginePorts = NO_PORTS,
        orders: Mapping[str, Order] = DEFAULT_ORDERS,
    ) -> None:
        self.config = config
        self.model = model
        self.executor = executor
        self.clock = clock
        self.drafter = drafter
        speculation = speculation or Speculation(GOODPUT, default_cost)
        groups = 1 + (drafter is not None and drafter.group == DRAFT)
        costs = CostModel(speculation.step_cost, ports.swap_cost)
        self.scheduler = Scheduler(config, groups, drafter is not None, costs)
        self._observer = ports.observer or Observer()
        self._journal = ports.journal or Journal()
        self.averages = RunningAverages()
        self._drafting = Drafting(
            drafter, speculation, self.scheduler, clock, ports.draft_wait, self._observer,
            self.averages, self._journal,
        )  # fmt: skip
        self.streams = StreamEdits(self.scheduler, config, model)
        self.stalled = False
        """Whether the last step could do nothing, because all sequences wait for memory."""
        self._standstill = Standstill()
        self.adapters = AdapterManager(ports.adapters)
        self._stepping = False
        self._deferred: list[ToEngine] = []
        self.transfers = make_transfers(self.scheduler, ports, clock, self._observer)
        eos = frozenset(model.eos_token_ids)
        self._order = orders[config.order]
        self._committer = StepCommitter(
            self.scheduler, self.transfers, self.averages, self._observer, speculation.counters, eos,
            config.max_model_len,
        )  # fmt: skip
        self._pipeline = StepPipeline(
            executor, self.scheduler, self.transfers, clock, self._observer, self._journal, ports.swap_cost
        )
        self._learning = StepLearning(self.averages)
        self.rows_dropped = 0
        """Number of dropped results: their sequences had ended or were edited before the step's end."""
        self._prompt_tokens = 0
        self._step_seconds = 0.0
        self._scheduling_seconds = 0.0
        self._floor = ports.floor
        self._floor_seconds = 0.0

    @property
    def speculation(self) -> Speculation:
        """The speculation controller, which decides about draft tokens and learns from them. It may be
        replaced between steps."""
        return self._drafting.speculation

    @speculation.setter
    def speculation(self, speculation: Speculation) -> None:
        self._drafting.speculation = speculation

    @property
    def has_work(self) -> bool:
        return self._pipeline.running or self.scheduler.has_work

    @property
    def steps_ahead(self) -> int:
        """Number of steps that were launched before the results of the step before them were known."""
        return self._pipeline.steps_ahead

    def handle(self, message: ToEngine) -> list[Event]:
        """Handle a message; returns its immediate events (a refusal, the end of a cancelled choice). During a
        step the message is deferred to the step's end, and its events are the step's."""
        self.stalled = False
        if self._stepping:
            self._deferred.append(message)
            return []
        self._journal.note(message)
        events = self._apply(message)
        self.scheduler.allocator.review_claims()
        if not self.has_work:
            self._standstill.clear()
        self._journal.leave(self.transfers.moving())
        return events

    def _apply(self, message: ToEngine) -> list[Event]:
        if isinstance(message, Submit | Edit) and message.arrival > (now := self.clock()):
            message = replace(message, arrival=now)  # another machine's clock: a future arrival would not age
        match message:
            case Submit():
                return self._submit(message)
            case Edit():
                return self._edit(message)
            case Cancel():
                return self._cancel(message)
            case Push() | Join() | Release() | Hold():
                self.transfers.handle(message)
                return []
            case LoadAdapter():
                self.adapters.load(message)
                return []
            case UnloadAdapter():
                return self._unload(message)

    def step(self) -> list[Event]:
        self._stepping = True
        started = self.clock()
        try:
            events = self._step()
        finally:
            self._stepping = False
        self._step_seconds += self.clock() - started
        self._journal.leave(self.transfers.moving())
        later, self._deferred = self._deferred, []
        for message in later:
            events += self.handle(message)
        return events

    def leave(self) -> None:
        """Leave the fleet: remove all requests without events, forget all transfers and unload all adapters.
        To be called after the transport was closed. The prefix cache stays, and blocks that other workers may
        still write stay in quarantine (KVTransferManager.release_abandoned)."""
        for sequence in list(self.scheduler.sequences.values()):
            self.transfers.remove(sequence)
        self.transfers.abandon()
        while self.has_work:  # finish a step launched ahead, and let the executor forget the sequences
            self.step()
        self.adapters.unload_all()
        self._journal.leave([])  # the next fleet's attempts may have the same numbers

    def attach(self, transport: Transport | None, cache: CacheAddress | None, name: str) -> None:
        """Join another fleet under the worker name `name`, after `leave`. The next `take_cache_updates`
        returns all prefixes."""
        self.transfers.attach(transport, cache, name)
        self.scheduler.tables.pool.report_all()

    def _step(self) -> list[Event]:
        flight = self._pipeline.next() or self._plan()
        limit = MAX_AHEAD if self.drafter is None else min(MAX_AHEAD, self.speculation.steps_between)
        self._pipeline.start(flight, self.speculation, limit)
        compiled = self._pipeline.can_follow and self._drafting.draft_ahead(flight.plan)
        self._learning.learn()  # while a device computes
        result, spent = self._pipeline.finish(
            flight, self.speculation.step_cost, lambda: self._drafting.collect_pending(flight.round)
        )
        self._record(flight, result, spent, compiled or result.compiled)
        self.transfers.issue()
        events = self._commit(flight, result)
        plan = flight.plan
        moved = plan.spans or plan.swap_out or plan.swap_in or plan.released
        self.stalled = not (self._pipeline.running or moved)
        if not (self._pipeline.asynchronous and self.has_work):
            self._learning.learn()
        self._standstill.stepped(self.stalled, self.clock(), self.scheduler, self.transfers)
        self._floor_seconds += self._floor(plan) if self._floor else 0.0
        if self.config.check:
            check_state(self.scheduler, self.transfers)
            # A step may compute nothing because a sequence could not start as expected: once per sequence.
            if self._standstill.steps > len(self.scheduler.sequences):
                check_advance(self.scheduler, self.transfers)
        return events

    def _plan(self) -> Flight:
        """Plan a step, with all results known."""
        started, elsewhere = self.clock(), self._computing_seconds
        self._journal.enter("plan", None)
        self.scheduler.allocator.review_claims()
        able = [s for s in self.scheduler.sequences.values() if s.status.schedulable]
        for sequence in able:
            sequence.tick(started)
        expected = self.transfers.expected()
        for sequence in expected:
            sequence.tick(started)
        candidates = batch_candidates(
            able, expected, self.config, self._order, started, self.speculation, self.averages
        )
        self.transfers.defer(candidates.deferred_handovers)
        proposals = self.scheduler.plan(candidates)
        round, trees = self._drafting.draft(proposals)
        self._drafting.catch_up_prompts(proposals)
        plan = self.scheduler.select(proposals, trees)
        if self.config.check:
            check_plan(plan, self.scheduler)
        self._drafting.read_ahead(plan)
        members = [self.scheduler.sequences[span.sequence] for span in plan.spans]
        for span, sequence in zip(plan.spans, members, strict=True):
            self.transfers.advance(sequence, len(span.tokens))
        self._scheduling_seconds += self.clock() - started - (self._computing_seconds - elsewhere)
        return Flight(plan, round, proposals, members, started)

    def _record(self, flight: Flight, result: StepResult, spent: float, compiled: bool) -> None:
        """Record a step that took `spent` seconds, before its results are committed. `compiled`: the step, or
        a launch with it, compiled something, so that nothing is to be learned from its time."""
        plan = flight.plan
        self._observer.on_event("verified-before-commit")
        self._journal.enter("commit", flight.members, plan=plan)
        query_tokens = repeat(1) if flight.ahead else [span.query_tokens for span in plan.spans]
        requests = [sequence.request for sequence in flight.members]
        self._observer.on_step(list(zip(requests, query_tokens, strict=False)), spent)
        self.scheduler.allocator.stepped(plan, spent, result.swap_seconds)
        if plan.spans and spent > 0 and not compiled:
            self._learning.add(flight, result, spent, self._pipeline.interval)

    def _commit(self, flight: Flight, result: StepResult) -> list[Event]:
        events = admissions(flight.proposals, flight.began)
        for event in events:
            self._observer.on_event("first chunk", event.request)
        if flight.ahead:
            return events + self._commit_ahead(flight, result)
        pairs = zip(flight.plan.spans, result.spans, strict=True)
        for span, outcome in compress(pairs, self._standing(flight)):
            events += self._committer.commit(span, outcome)
            events += self.streams.progress(span.sequence, flight.began)
        self._committer.count_step(zip(flight.plan.spans, flight.members, strict=True))
        return events

    def _commit_ahead(self, flight: Flight, result: StepResult) -> list[Event]:
        """Commit the results of a step that was planned ahead: each sequence has exactly one new token."""
        events: list[Event] = []
        results = zip(flight.plan.spans, flight.members, result.spans, strict=True)
        for span, sequence, outcome in compress(results, self._standing(flight)):
            events += self._committer.commit_next(span, sequence, outcome)
            sequence.tick(flight.began)
        self._committer.count_step([])
        return events

    def _standing(self, flight: Flight) -> list[bool]:
        """Return whether each result of a step is still valid, and count the others."""
        standing = flight.standing(self.scheduler.sequences)
        self.rows_dropped += standing.count(False)
        return standing

    def take_cache_updates(self) -> Cached | None:
        """Return the changes of the prefix index since the last call, for routing; None without changes, or
        if they are not recorded."""
        stored, dropped = self.scheduler.tables.pool.take_changes()
        return Cached(stored, dropped) if stored or dropped else None

    def report(self) -> Report:
        """Return the engine's state and counters as of now."""
        scheduler, pool = self.scheduler, self.scheduler.tables.pool
        running = len(scheduler.allocator.running())
        return Report(
            running=running,
            waiting=len(scheduler.sequences) - running,
            blocks_total=pool.size,
            blocks_live=pool.size - pool.free,
            steps=scheduler.steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._committer.generation_tokens,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.allocator.preemptions,
            copies_on_write=scheduler.tables.copies_on_write,
            corrupted_requests=self._committer.corrupted_requests,
            step_seconds=self._step_seconds,
            step_parts=StepParts(
                scheduling=self._scheduling_seconds,
                draft=self.speculation.counters.draft_seconds,
                target=self._pipeline.computing_seconds,
            ),
            step_tokens=self._committer.step_tokens,
            step_floor_seconds=self._floor_seconds if self._floor else None,
            speculation=None if self.drafter is None else self.speculation.report(),
            evictions=replace(scheduler.allocator.evictions),
            streams=replace(self.streams.counters),
            transfer=self.transfers.report(),
            standstill_seconds=self._standstill.seconds(self.clock()),
        )

    @property
    def _computing_seconds(self) -> float:
        """Total seconds spent in the draft and target models."""
        return self.speculation.counters.draft_seconds + self._pipeline.computing_seconds

    def _submit(self, message: Submit) -> list[Event]:
        error = refusal(message, self.config, self.model, self.transfers.serves(message.phase))
        if error:
            return final_events(message, error)
        if missing := self.adapters.refusal(message.adapter):
            return final_events(message, missing, 503)
        if message.kind is RequestKind.CLIENT:
            self._observer.on_event("submitted", message.request)
        for sequence in self.scheduler.of(message.request):
            self.transfers.remove(sequence)  # an earlier attempt: only the latest one is served
        fresh = not any(message.outputs.values())
        parts = [tuple(sorted(message.outputs))] if fresh else [(c,) for c in sorted(message.outputs)]
        for choices in parts:
            root = root_hash(self.model.kv_name, message.cache_salt, message.adapter)
            groups, survival = self.scheduler.tables.groups, self.streams.survival
            sequence = make_sequence(
                message, choices, self.scheduler.new_id(), root, groups, survival, self.config.check
            )
            self.scheduler.add(sequence)
            is_copy = sequence.transfer.role is TransferRole.COPY
            if is_copy and not self.scheduler.attach_copy(sequence):
                self.scheduler.remove(sequence)
                return final_events(message, "its KV is no longer in this worker's cache")
            if may_be_infeasible(message) and (refused := self._infeasible(sequence)):
                return refused
            if not is_copy:
                self._drafting.foresee([sequence])
        if message.phase in ("both", "prefill") and not message.open:
            self._prompt_tokens += len(message.prompt)
        return []

    def _infeasible(self, sequence: EngineSequence) -> list[Event]:
        """Remove a sequence whose latency targets cannot be met, if `slo_admission` is set; returns its final
        events. Before the first timed step nothing is refused, because costs are not known."""
        if not (self.config.slo_admission and self.speculation.step_cost.observed):
            return []
        others = [other for other in self.scheduler.sequences.values() if other is not sequence]
        load = workload(others, self.config, self._order, sequence, self.speculation, self.averages)
        events = infeasible_events(sequence, load)
        if events:
            self.transfers.remove(sequence)
        return events

    def _edit(self, message: Edit) -> list[Event]:
        self._observer.on_event("edit", message.request)
        events = self.streams.edit(message)
        edited = [s for s in self.scheduler.of(message.request) if s.attempt == message.attempt]
        self._drafting.foresee(edited)
        if message.finish:
            for sequence in edited:
                if not (sequence.outputs or sequence.submitted.answer_early):
                    events += self._infeasible(sequence)
            self._prompt_tokens += max((s.prompt_length for s in edited), default=0)
        return events

    def _cancel(self, message: Cancel) -> list[Event]:
        events: list[Event] = []
        for sequence in self.scheduler.of(message.request):
            events += self._abort(sequence, message.choice)
        return events

    def _unload(self, message: UnloadAdapter) -> list[Event]:
        """Free an adapter. Sequences that still use it end."""
        events: list[Event] = []
        for sequence in list(self.scheduler.sequences.values()):
            if sequence.submitted.adapter == message.fingerprint:
                events += self._abort(sequence)
        self.adapters.unload(message)
        return events

    def _abort(self, sequence: EngineSequence, choice: int | None = None) -> list[Event]:
        """End one choice of a sequence (None: all), and the sequence with its last choice. Return the final
        events."""
        ended = [other for other in sequence.choices if choice in (None, other)]
        sequence.choices = tuple(other for other in sequence.choices if other not in ended)
        if not sequence.choices:
            self.transfers.remove(sequence)
        return [Finished(sequence.request, sequence.attempt, other, "abort") for other in ended]
