"""Reports of several workers are merged, each field by the rule that it declares."""

import inspect

import msgspec
import pytest
from msgspec.structs import replace

from streamserve.fleet.report_totals import counted, merges, total
from streamserve.protocol import reports
from streamserve.protocol.reports import (
    Count,
    EvictionReport,
    Merge,
    RemoteReport,
    Report,
    SpeculationReport,
    StepParts,
    StepTokens,
    StreamReport,
    TransferReport,
)
from tests.api.reports import REPORT

PARTS = {
    "step_parts": StepParts,
    "step_tokens": StepTokens,
    "speculation": SpeculationReport,
    "evictions": EvictionReport,
    "streams": StreamReport,
    "transfer": TransferReport,
    "remote": RemoteReport,
}
REMOTE = RemoteReport(
    services=2, trees=5, late=1, accepted=3, fallback_trees=4, fallback_accepted=1, moves=0,
    rejected={"late": 1},
)  # fmt: skip
FULL = replace(REPORT, step_floor_seconds=0.25, standstill_seconds=3.0, remote=REMOTE)


def test_every_field_of_every_report_declares_how_it_is_merged() -> None:
    assert {name for name, merge in merges(Report).items() if merge is Merge.FIELDS} == PARTS.keys()
    for struct in (Report, *PARTS.values()):
        assert merges(struct).keys() == set(struct.__struct_fields__)
    reported = {value for value in vars(reports).values() if inspect.isclass(value)}
    structs = {struct for struct in reported if issubclass(struct, msgspec.Struct)}
    assert structs == {Report, *PARTS.values(), reports.IncidentReport}, "IncidentReport is made by the fleet"


def test_a_field_that_does_not_declare_it_is_an_error() -> None:
    class Undeclared(msgspec.Struct):
        steps: Count
        version: int

    with pytest.raises(TypeError, match=r"Undeclared\.version"):
        merges(Undeclared)


def test_the_total_of_one_report_is_that_report() -> None:
    assert total([FULL]) == FULL
    assert total(iter(())) is None


def test_counters_and_present_state_add_up() -> None:
    both = total([FULL, FULL])
    assert both is not None
    assert (both.steps, both.step_seconds) == (2 * FULL.steps, 2 * FULL.step_seconds)
    assert (both.running, both.blocks_total) == (2 * FULL.running, 2 * FULL.blocks_total)
    assert both.remote is not None
    assert both.remote.services == 4, "each worker has some of the sessions"


def test_times_that_pass_at_all_workers_together_do_not_add_up() -> None:
    both = total([FULL, replace(FULL, standstill_seconds=1.0)])
    assert both is not None
    assert both.standstill_seconds == 3.0


def test_the_floor_of_steps_is_known_if_it_is_known_of_all_workers() -> None:
    """The floor of steps is known only if it is known for all workers: it is divided by the time of all
    workers' steps, so the share would otherwise be too small."""
    both, unknown = total([FULL, FULL]), total([FULL, replace(FULL, step_floor_seconds=None)])
    assert both is not None
    assert unknown is not None
    assert both.step_floor_seconds == 0.5
    assert unknown.step_floor_seconds is None


def test_lists_are_added_by_index_and_dictionaries_by_key() -> None:
    speculation = REPORT.speculation
    assert speculation is not None
    deeper = replace(
        FULL,
        speculation=replace(speculation, accepted_at=[1, 1, 1, 1]),
        remote=replace(REMOTE, rejected={"shape": 2, "late": 3}),
    )
    both = total([FULL, deeper])
    assert both is not None
    assert both.speculation is not None
    assert both.remote is not None
    assert both.speculation.accepted_at == [6, 4, 2, 1]
    assert both.remote.rejected == {"late": 4, "shape": 2}


def test_parts_that_only_one_worker_has_are_kept() -> None:
    both = total([replace(FULL, remote=None, speculation=None), FULL])
    assert both is not None
    assert (both.remote, both.speculation) == (FULL.remote, FULL.speculation)


def test_an_ended_worker_leaves_its_counters_without_its_state() -> None:
    left = counted(FULL)
    assert (left.running, left.waiting, left.blocks_total, left.blocks_live) == (0, 0, 0, 0)
    assert left.standstill_seconds == 0.0
    assert left.remote == replace(REMOTE, services=0)
    assert left == replace(
        FULL, running=0, waiting=0, blocks_total=0, blocks_live=0, standstill_seconds=0.0, remote=left.remote
    )
