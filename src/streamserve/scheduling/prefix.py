"""Hashes of full KV blocks, for the prefix index. A block's hash covers its tokens and all tokens before
them; it is stable across processes and machines."""

from array import array
from hashlib import blake2b


def namespace(*parts: str) -> bytes:
    """Return the parent hash of first blocks in the namespace `parts`: equal tokens in different namespaces
    have different hashes."""
    digest = blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def root_hash(model: str, salt: str, adapter: str) -> bytes:
    """Return the parent hash of a request's first block. Model, cache salt and LoRA adapter (empty: none)
    keep prefixes apart."""
    return namespace(model, salt, adapter) if adapter else namespace(model, salt)


def block_hash(parent: bytes, tokens: list[int]) -> bytes:
    """Return blake2b-128 of the parent's hash and this block's token ids (32-bit little endian)."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=16).digest()


def extend_hashes(hashes: list[bytes], root: bytes, tokens: list[int], block_size: int, length: int) -> None:
    """Append to `hashes` the missing hashes of the full blocks among the first `length` tokens."""
    for index in range(len(hashes), length // block_size):
        parent = hashes[-1] if hashes else root
        hashes.append(block_hash(parent, tokens[index * block_size : (index + 1) * block_size]))
