"""The characters with which byte-level BPE represents bytes."""


def byte_of_character() -> dict[str, int]:
    """Return the inverse of byte-level BPE's mapping from each byte to a printable character."""
    printable = [byte for first, last in ("!~", "¡¬", "®ÿ") for byte in range(ord(first), ord(last) + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
