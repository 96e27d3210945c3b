"""The project's language: words that were private to it do not come back."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

REPLACED = {
    "agenda": "batch candidates",
    "anew": "again",
    "bystanders?": "requests without draft tokens",
    "cellar": "dependency",
    "crew": "supervisor",
    "destined?": "inject a fault",
    "edit scripts?": "prompt stream",
    "fates?": "fault injection",
    "guess(?:es|ed)?": "draft tokens, drafted",
    "hopeless": "infeasible",
    "ladders?": "cumulative acceptance",
    "leeway": "slack",
    "mended": "corrected",
    "news": "updates",
    "nobody": "no request, no client",
    "on their way": "in flight",
    "open prompts?(?! stream)": "prompt stream",
    "arriving prompts?": "prompt stream",
    "patience": "maximum wait",
    "pretend(?:ed|s)?": "fake, simulated",
    "printed (?:formula|weights|version)": "as published",
    "resting": "idle",
    "rooms?": "free slots, headroom, free blocks",
    "rungs?": "cumulative acceptance",
    "seats?": "sequence slots",
    "shelf": "sequence store",
    "some day": "(say when, or leave it out)",
    "somebody": "a client, a request",
    "stand[- _]ins?": "fallback drafter",
    "steady": "edit-stable",
    "tickets?": "transfer reservation",
    "_told|told_(?:at|now)": "synced",
    "to the letter": "as published",
    "triage": "SLO admission",
    "unserved": "unsupported",
    "warmth": "keep-warm controller",
}
"""Words as regular expressions, and their replacements."""

ALLOWED = {
    "src/streamserve/embedded": "the packaged model's vocabulary",
    "packaged_model/embedded_data": "texts that the packaged model is trained on",
    "tests/test_language.py": "the list itself",
}
"""Files and folders in which any word is allowed, and why."""

KINDS = {".py", ".md", ".cpp", ".h", ".html", ".toml"}
WORD = re.compile(f"(?:{'|'.join(REPLACED)})(?![a-z])")
"""A replaced word in lower case. That no letter comes before it is checked separately, since a regular
expression would be slow."""


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [name for name in listed.splitlines() if Path(name).suffix in KINDS]
    assert len(files) > 500
    return [name for name in files if not name.startswith(tuple(ALLOWED))]


def instead_of(word: str) -> str:
    """Return the replacement of a word that was found."""
    return next(new for old, new in REPLACED.items() if re.fullmatch(old, word))


def words_in(text: str) -> list[str]:
    """Return the replaced words of a text, with their lines, as `line: word -> instead`."""
    text = text.lower()
    matches = (match for match in WORD.finditer(text) if not text[: match.start()][-1:].isalpha())
    return [f"{text.count(chr(10), 0, m.start()) + 1}: {m[0]!r} -> {instead_of(m[0])!r}" for m in matches]


def test_no_replaced_word_is_used() -> None:
    found = [f"{name}:{word}" for name in tracked() for word in words_in((ROOT / name).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    ["room_for(2)", "self._told = 1", "tell somebody", "the Ticket", "a stand-in", "STAND_IN = 1"],
)
def test_words_are_found_in_names_and_sentences(text: str) -> None:
    assert words_in(text)


@pytest.mark.parametrize("text", ["mushroom", "headroom", "imprinted", "newsletter", "toldo", "groom"])
def test_other_words_are_left_alone(text: str) -> None:
    assert not words_in(text)
