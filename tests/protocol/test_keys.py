"""Keys are stored as digests, and a digest cannot be used as a key."""

import hashlib

import pytest

from streamserve.protocol.keys import digest, entry, matches, tenants


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


def test_a_line_of_a_key_file_may_name_the_keys_tenant() -> None:
    assert entry("first-key") == digest("first-key")
    assert entry("first-key \t team-a") == f"{digest('first-key')} team-a" == entry(entry("first-key team-a"))


@pytest.mark.parametrize(
    "line", ["", "key two words", "key -team", "key t:a", f"key {'0' * 64}", "sha256:12 team"]
)
def test_a_line_that_names_no_tenant_is_refused_unquoted(line: str) -> None:
    with pytest.raises(ValueError, match=r"must (have|be)") as refused:
        entry(line)
    assert not line or line.split(maxsplit=1)[1] not in str(refused.value)


def test_a_key_without_a_name_is_a_tenant_alone() -> None:
    entries = [entry(line) for line in ("first-key team", "second-key team", "third-key", "fourth-key")]
    third, fourth = digest("third-key"), digest("fourth-key")
    assert list(tenants(entries).values()) == ["team", "team", third, fourth]
    with pytest.raises(ValueError, match="two tenants"):
        tenants([*entries, entry("third-key team")])
