"""Lone surrogates, which JSON can write as escapes, but which are no characters."""


def well_formed(text: str) -> str:
    """Return `text` with U+FFFD in place of each lone surrogate. Two surrogates that form a character become
    this character."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
