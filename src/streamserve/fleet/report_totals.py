"""The total of several workers' reports, field by field as the reports declare."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain, zip_longest
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from streamserve.protocol.reports import Merge, Report

S = TypeVar("S", bound=msgspec.Struct)


def total(reports: Iterable[Report]) -> Report | None:
    """Return the total of several workers' reports; None for no reports."""
    present = list(reports)
    return _merged(present) if present else None


def counted(report: Report) -> Report:
    """Return the part of a report that still counts after its worker has ended: the counters, without the
    state."""
    return _without_state(report)


@cache
def merges(struct: type[msgspec.Struct]) -> Mapping[str, Merge]:
    """Return how each field of a report is merged. Raises TypeError for a field that does not declare it."""
    declared = {}
    for name, hint in get_type_hints(struct, include_extras=True).items():
        kinds = [part for part in get_args(hint) if isinstance(part, Merge)]
        if len(kinds) != 1:
            raise TypeError(f"{struct.__name__}.{name} must declare how it is merged, once")
        declared[name] = kinds[0]
    return declared


def _merged(reports: Sequence[S]) -> S:
    struct = type(reports[0])
    return struct(
        **{
            name: _merge(merge, [getattr(report, name) for report in reports])
            for name, merge in merges(struct).items()
        }
    )


def _merge(merge: Merge, values: Sequence[Any]) -> Any:
    present = [value for value in values if value is not None]
    if not present or (merge is Merge.COMPLETE_COUNTER and len(present) < len(values)):
        return None
    match merge:
        case Merge.COUNTER | Merge.COMPLETE_COUNTER | Merge.STATE:
            return sum(present)
        case Merge.LONGEST_STATE:
            return max(present)
        case Merge.COUNTERS_BY_INDEX:
            return [sum(counts) for counts in zip_longest(*present, fillvalue=0)]
        case Merge.COUNTERS_BY_KEY:
            keys = dict.fromkeys(chain(*present))
            return {key: sum(counts.get(key, 0) for counts in present) for key in keys}
        case Merge.FIELDS:
            return _merged(present)


def _without_state(report: S) -> S:
    changes: dict[str, Any] = {}
    for name, merge in merges(type(report)).items():
        value = getattr(report, name)
        if merge in (Merge.STATE, Merge.LONGEST_STATE):
            changes[name] = type(value)()
        elif merge is Merge.FIELDS and value is not None:
            changes[name] = _without_state(value)
    return msgspec.structs.replace(report, **changes)
