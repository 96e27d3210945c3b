"""Several services in virtual time: each sequence goes to the service that finishes it first, equal services
share sequences, and a dead service is abandoned. Every tree is checked against its sequence's tokens, and
every text against the target's."""

import random
from collections import Counter

import pytest

from streamserve.draft_service.server.admission import Limits
from streamserve.draft_service.server.types import ServiceConfig
from tests.draft_service.star import Place, Star, next_token

WIDTH = 6
GOOD = Place()
WORSE = {
    "slow": Place(slower=6.0),
    "far": Place(far=0.04),
    "with a bad draft model": Place(accepted=0.1),
}


def running(places: list[Place], targets: int = 1, seed: int = 1, **fields: float) -> Star:
    config = ServiceConfig(num_blocks=2000, max_read=64, limits=Limits(by_model=False))
    fields = {"width": WIDTH, "length": 200, **fields}
    star = Star(random.Random(seed), config, targets, len(places), places=places, **fields)
    star.every(0.25, lambda: [service.tick(star.now) for service in star.services if service])
    return star


def placed(star: Star) -> Counter[int | None]:
    return Counter(service for target in star.targets for service in target.placed())


def shares(star: Star, seconds: float) -> list[float]:
    """Return the share of the sequences at each service, averaged over some seconds."""
    total: Counter[int | None] = Counter()
    for _ in range(20):
        star.run(seconds / 20)
        total += placed(star)
    return [total[number] / total.total() for number in range(len(star.services))]


def assert_texts(star: Star) -> None:
    """Assert that texts are the target's, and that some draft tokens were accepted."""
    finished = [tokens for target in star.targets for tokens in target.finished]
    assert finished
    for tokens in finished:
        for place in range(len(tokens) - 150, len(tokens)):
            assert tokens[place] == next_token(tokens[:place])
    assert sum(target.accepted for target in star.targets) > 0


@pytest.mark.each_value
@pytest.mark.parametrize("what", WORSE)
@pytest.mark.parametrize("better", [0, 1])
def test_sequences_go_to_the_better_service(what: str, better: int) -> None:
    places = [GOOD, GOOD]
    places[1 - better] = WORSE[what]
    star = running(places)
    star.run(5.0)
    assert shares(star, 10.0)[better] > 0.8
    assert_texts(star)


def test_sequences_move_when_their_service_becomes_slow() -> None:
    star = running([GOOD, GOOD], length=3000)
    star.run(3.0)
    there = placed(star)[0]
    assert there > 0
    star.places[0] = Place(slower=20.0)
    star.run(7.0)
    assert placed(star)[0] == 0
    assert star.targets[0].client.placement.moves == there
    before = star.targets[0].accepted
    star.run(1.0)
    assert star.targets[0].accepted > before
    assert star.targets[0].opened == WIDTH, "the same sequences"


def test_what_is_better_is_worth_no_move_for_a_hair() -> None:
    star = running([GOOD, Place(slower=1.1)], length=3000)
    star.run(8.0)
    assert star.targets[0].client.placement.moves == 0


@pytest.mark.parametrize("targets", [1, 4])
def test_equal_services_share_the_load(targets: int) -> None:
    star = running([GOOD, GOOD], targets, width=8 // targets)
    star.run(2.0)
    assert all(0.35 < share < 0.65 for share in shares(star, 10.0))
    drafted = [service.statistics.counters.trees for service in star.services]
    assert min(drafted) > 0.5 * max(drafted)
    assert_texts(star)


def test_several_services_give_more_tokens_than_one_where_drafting_limits() -> None:
    tokens = []
    for count in (1, 2):
        star = running([Place(slower=4.0)] * count, width=8)
        star._cost = lambda batch: 0.001 * len(batch.requests)
        star.run(20.0)
        tokens.append(sum(len(each) for each in star.targets[0].finished))
    assert tokens[1] > 1.1 * tokens[0]


def test_the_sequences_of_a_service_that_dies_go_on_at_another() -> None:
    star = running([GOOD, GOOD], length=3000)
    star.run(3.0)
    target = star.targets[0]
    at_first = [n for n, service in enumerate(target.placed()) if service == 0]
    assert 0 < len(at_first) < WIDTH
    texts = [text.tokens for text in target.texts]
    star.kill(0)
    star.run(4.0)
    assert placed(star) == {1: WIDTH}
    assert target.client.placement.moves == 0, "sequences did not move to a better service"
    before = target.accepted
    star.run(2.0)
    assert target.accepted > before
    for number in at_first:
        tokens = texts[number]
        for place in range(len(tokens) - 50, len(tokens)):
            assert tokens[place] == next_token(tokens[:place])
    star.start(0)
    target.length = 60
    star.run(4.0)
    assert placed(star)[0] > 0, "new sequences go there again"


def test_without_any_service_the_text_goes_on() -> None:
    star = running([GOOD, GOOD])
    star.run(2.0)
    for number in (0, 1):
        star.kill(number)
    star.run(5.0)
    target = star.targets[0]
    accepted, finished = target.accepted, len(target.finished)
    star.run(10.0)
    assert target.accepted == accepted
    assert len(target.finished) > finished
    star.start(1)
    star.run(5.0)
    assert placed(star)[1] > 0
    assert target.accepted > accepted
    assert_texts(star)
