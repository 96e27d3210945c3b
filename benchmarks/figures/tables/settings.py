"""Tables of settings: those that need other settings, and pairs of tested values that the rules refuse."""

from collections import defaultdict

from streamserve.settings.effects import NEEDS, Need

from .base import TABLES, markdown


def _needs(up: str) -> str:
    return markdown(
        ["settings", "have an effect only with"], [[_settings(need), need.needed] for need in NEEDS]
    )


def _settings(need: Need) -> str:
    flags = [f"`{_flag(name, value)}`" for name in need.settings for value in need.values or ("",)]
    return ", ".join(flags)


def _holes(up: str) -> str:
    # The tables of tested values belong to the tests, which load torch.
    from tests.combinations.axes import AXES, axes, refusal
    from tests.combinations.covering import find_holes

    lines: dict[tuple[str, str, str], set[tuple[str, str]]] = defaultdict(set)
    for kind in ("simulated", "live"):
        values = {
            axis: [name for name in names if name not in ("nixl", "ray")]
            for axis, names in axes(kind).items()
        }
        for hole, reason in find_holes(values, refusal).items():
            (one, first), (other, second) = sorted(hole, key=lambda item: list(AXES).index(item[0]))
            lines[one, other, reason.partition(": ")[2]].add((first, second))
    rows = []
    for (one, other, reason), pairs in lines.items():
        firsts, seconds = ({pair[side] for pair in pairs} for side in (0, 1))
        assert len(pairs) == len(firsts) * len(seconds), (one, other)
        rows.append(
            [_values(one, firsts, list(AXES[one])), _values(other, seconds, list(AXES[other])), reason]
        )
    return markdown(["a value of", "with one of", "is refused, because"], rows)


def _flag(name: str, value: object) -> str:
    """Return a setting's flag with a value, as it is typed."""
    name = name.replace("_", "-")
    return f"--no-{name}" if value is False else f"--{name} {value}".rstrip()


def _values(axis: str, names: set[str], order: list[str]) -> str:
    return f"{axis}: " + ", ".join(name for name in order if name in names)


TABLES["settings/needs"] = _needs
TABLES["settings/holes"] = _holes
