"""Keys are kept as digests, and a digest opens nothing."""

import hashlib

import pytest

from streamserve.protocol.keys import digest, matches


def test_a_key_matches_its_digest_and_no_other() -> None:
    keys = [digest("first-key"), digest("second-key")]
    assert matches("first-key", keys)
    assert matches("second-key", keys)
    assert not matches("third-key", keys)
    assert not matches("", keys)
    assert not matches("first-key", [])


def test_a_digest_is_kept_as_it_is_but_is_no_key() -> None:
    known = "sha256:" + hashlib.sha256(b"first-key").hexdigest()
    assert digest("first-key") == known == digest(known)
    assert not matches(known, [known])


@pytest.mark.parametrize("key", ["", "two words", "ключ", "line\nbreak", "x" * 1025, "sha256:", "sha256:ABC"])
def test_what_could_not_be_a_key_is_refused_unquoted(key: str) -> None:
    with pytest.raises(ValueError, match=r"must (have|be)") as refused:
        digest(key)
    assert not key or key not in str(refused.value) or key == "sha256:"


def test_bytes_that_are_no_text_match_nothing() -> None:
    assert not matches("\udcff", [digest("first-key")])
