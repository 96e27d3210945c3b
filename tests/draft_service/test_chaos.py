"""Under network faults and restarts, every tree was drafted for exactly the target's tokens, and trees arrive
again after the faults."""

import random

from hypothesis import given
from hypothesis import strategies as st

from streamserve.draft_service.server.types import ServiceConfig
from tests.draft_service.star import Network, Star

networks = st.builds(
    Network,
    lost=st.sampled_from([0.0, 0.05, 0.3]),
    twice=st.sampled_from([0.0, 0.3]),
    delay=st.sampled_from([0.0, 0.001, 0.02]),
    jitter=st.sampled_from([0.0, 0.005, 0.1]),
)
configs = st.builds(
    ServiceConfig,
    num_blocks=st.sampled_from([14, 40, 400]),
    block_size=st.just(16),
    max_batch=st.sampled_from([1, 4, 16]),
    max_read=st.sampled_from([7, 64, 256]),
    lease=st.sampled_from([0.5, 5.0]),
)


@given(st.integers(0, 2**32), networks, configs, st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_trees_always_fit_and_come_back(seed, network, config, targets, services, edits):
    star = Star(random.Random(seed), config, targets, services, network)
    star.edits = 0.1 if edits else 0.0
    star.every(0.25, lambda: [service.tick(star.now) for service in star.services if service])

    def disturb() -> None:
        number = star.rng.randrange(services)
        if star.services[number] is None:
            star.start(number)
        elif star.rng.random() < 0.5:
            star.kill(number)
        else:
            star.start(number)  # Restarted at once, so that the new service does not know the sessions.

    for _ in range(star.rng.randint(0, 3)):
        star.run(0.7)
        disturb()
    star.network = Network()
    for number in range(services):
        if star.services[number] is None:
            star.start(number)
    star.run(10.0)
    before = [target.accepted for target in star.targets]
    star.run(2.0)
    assert all(target.accepted > was for target, was in zip(star.targets, before, strict=True))
    for service in star.services:
        for session in service.sessions.values():
            for sequence in session.sequences.values():
                assert sequence.read <= len(sequence.tokens)


@given(st.integers(0, 2**32), networks)
def test_nothing_leaks_when_all_targets_have_ended(seed, network):
    star = Star(random.Random(seed), ServiceConfig(num_blocks=60, lease=1.0), 3, 1, network)
    star.run(1.0)
    service = star.services[0]
    for target in star.targets[1:]:
        target.client.begin = lambda *a: []  # these two end without a message
        target.client.tick = lambda now: []
    dropped = star.targets[0]
    star._to_services(dropped, dropped.client.close(star.now))
    dropped.client.tick = lambda now: []
    star.run(3.0)
    service.tick(star.now)
    assert not service.sessions
    assert service.memory.pool.free == service.memory.pool.size
    assert service.loop.batch(star.now) is None
    released = service.loop.take_released()
    assert set(star.drafters[0].known) <= set(released)
