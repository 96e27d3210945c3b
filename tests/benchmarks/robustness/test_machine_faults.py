"""A smoke run of machine faults. It is a separate file because it depends on the campaigns."""

import pytest

from benchmarks.robustness import machine_faults
from tests.benchmarks.conftest import Smoke
from tests.conftest import Scale
from tests.extras.cluster.namespaces import why_no_wire


def test_a_smoke_run(smoke: Smoke, scale: Scale) -> None:
    if not scale.full:
        pytest.skip("with --full: starts servers on several machines")
    if reason := why_no_wire():
        pytest.skip(reason)
    assert "machine_faults.json" in smoke(machine_faults)
