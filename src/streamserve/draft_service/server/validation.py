"""Validation by a draft service: incompatible targets, and deltas that no honest target would send."""

from streamserve.draft_service.server.admission import Limits
from streamserve.draft_service.server.sessions import Session
from streamserve.draft_service.server.types import ServiceIdentity
from streamserve.protocol.drafting import DRAFT_VERSION, Delta, Hello, Reason
from streamserve.protocol.sampling import MAX_CHOICES, check_sampling


def incompatibility(hello: Hello, own: ServiceIdentity) -> tuple[Reason, str] | None:
    """Return why a target is incompatible with the service, or None."""
    if hello.version != DRAFT_VERSION:
        return (
            "version",
            f"protocol version {hello.version} is not supported; this service uses {DRAFT_VERSION}",
        )
    if hello.vocabulary != own.vocabulary:
        return "vocabulary", "the draft model has another vocabulary"
    if hello.tokenizer != own.tokenizer:
        return "tokenizer", "the draft model has another tokenizer"
    return None


def delta_error(delta: Delta, session: Session, identity: ServiceIdentity, limits: Limits) -> str:
    """Return why a delta is invalid; "" if it is valid. An honest target sends no invalid delta."""
    vocabulary = identity.vocab_size
    if not (0 <= delta.depth <= limits.max_depth and 0 <= delta.nodes <= limits.max_nodes):
        return f"trees may have {limits.max_depth} levels and {limits.max_nodes} nodes"
    if not (0 <= delta.width <= limits.max_nodes and len(delta.expansion) <= limits.max_depth):
        return f"trees may be {limits.max_nodes} wide"
    if delta.expansion and not delta.depth <= len(delta.expansion):
        return "an expansion must have an entry for each level of the tree"
    if any(not 0 < each <= limits.max_nodes for each in delta.expansion):
        return f"the entries of an expansion must be from 1 to {limits.max_nodes}"
    if min(delta.retained, delta.output, delta.number, delta.choice, delta.epoch) < 0 or not delta.tokens:
        return "a delta must have tokens, and no negative numbers"
    if max(delta.number, delta.epoch) >= 1 << 62 or delta.choice >= MAX_CHOICES:
        return "a number is too large"
    if min(delta.tokens) < 0 or max(delta.tokens) >= vocabulary:
        return f"the vocabulary has {vocabulary} tokens"
    if delta.retained + len(delta.tokens) > limits.max_tokens or delta.output > delta.retained + len(
        delta.tokens
    ):
        return f"sequences may have {limits.max_tokens} tokens, including outputs"
    if delta.sequence not in session.sequences and len(session.sequences) >= limits.max_sequences:
        return f"a target may have {limits.max_sequences} sequences"
    if delta.params is not None:
        if delta.params.grammar is not None or (delta.params.seed is None and not delta.params.greedy):
            return "sampling parameters for drafting need a seed, and must not have a grammar"
        try:
            check_sampling(delta.params, vocabulary, identity.eos_token_ids)
        except ValueError as error:
            return str(error)
    return ""
