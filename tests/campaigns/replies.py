"""Replies of models, split into any pieces, have the same blocks on three routes, and a reply can be sent
back wherever its stream was cut."""

import random

from streamserve.protocol.errors import RequestError
from tests.campaigns.outcome import UNCLEAR, WRONG_TEXT, Outcome
from tests.extras import reply_round_trip, reply_routes


def trial(seed: int) -> Outcome:
    """Generate a reply, and read it as the clients of the three routes do."""
    rng = random.Random(seed)
    text = "".join(rng.choices([*reply_routes.WORDS, *reply_round_trip.WORDS], k=rng.randint(1, 10)))
    positions = [rng.randint(0, len(text)) for _ in range(rng.randint(0, 20))]
    stop = rng.choice([None, *reply_routes.STOPS])
    format = rng.choice(reply_routes.CALL_FORMATS)
    settings = {"text": text, "positions": positions, "stop": stop, "format": format}
    try:
        reply_routes.assert_same_blocks(text, positions, stop, format)
        reply_round_trip.assert_round_trip(text, positions)
    except AssertionError as error:
        return Outcome(verdict="failed", kind=WRONG_TEXT, detail=f"{error}"[:500], settings=settings)
    except RequestError as error:
        return Outcome(verdict="failed", kind=UNCLEAR, detail=f"{error}"[:500], settings=settings)
    return Outcome(verdict="passed", counts={"characters": len(text), "pieces": len(positions) + 1})
