"""Make a profile of a machine with given rates."""

from streamserve.contracts.cost import fit
from streamserve.execution.profile.profile import Profile, ProfiledMachine, Subject

SUBJECT = Subject(
    ProfiledMachine("Some CPU @ 2.0GHz", 4, 2), "0123456789abcdef01", "bfloat16", "native-01234567"
)


def profile_of(subject: Subject = SUBJECT, **fields: object) -> Profile:
    values = {
        "subject": subject,
        "model": "some model",
        "measured": "2026-01-01T00:00:00+00:00",
        "quick": False,
        "stable": True,
        "rounds": 3,
        "bandwidth": 1e10,
        "matrix_rate": 1e12,
        "multiplier_rate": 2e12,
        "weight_bytes": 1000,
        "kv_token_bytes": 64,
        "cost": fit((1, 2), (0, 640), [[0.1, 0.2], [0.15, 0.3]]),
        "floor": ((0.1, 0.1), (0.1, 0.1)),
    }
    return Profile(**{**values, **fields})
