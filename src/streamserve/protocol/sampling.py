"""Sampling parameters of one request, under their usual names, validated once by the API server."""

import math
from functools import lru_cache
from typing import Any, Literal

import msgspec

from streamserve.protocol.field_errors import InvalidField, InvalidFieldType
from streamserve.protocol.grammar import Grammar, check_grammar
from streamserve.protocol.numbers import plain

MAX_CHOICES = 128
MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIAS = 4096
MAX_SPECULATION = 4096
MAX_VOCABULARY = 2**31 - 1
"""Every token id is below this limit; used for checks without a model."""

MAX_ALLOWED_TOKENS = 16384

INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
"""Fields that must be integers."""


class SpeculationLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of speculation for a request: the maximum depth of draft tokens, and the maximum number of draft
    tokens in a step."""

    enabled: bool = True
    max_depth: int = 20
    max_nodes: int = 64


class Slo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Latency targets of a request in milliseconds: the mean time per output token after the first, and the
    time to the first token. None: no target."""

    tpot_ms: float | None = None
    ttft_ms: float | None = None


NO_SLO = Slo()


PoolingKind = Literal["last", "mean", "logits"]


class Pooling(msgspec.Struct, frozen=True):
    """Requests a vector in place of output tokens. From the hidden states after the last norm: the last
    token's (`last`), or the mean of all (`mean`). Or the logits of `tokens` after the last token
    (`logits`)."""

    kind: PoolingKind = "last"
    tokens: tuple[int, ...] = ()


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Sampling settings of a request; names and meanings are OpenAI's and vLLM's.

    As in OpenAI's API, a single `stop` may be given as a string. Lists may be given in place of tuples; None
    means none.

    - `temperature`: 0 is greedy. `top_k`: 0 and -1 mean no limit.
    - `seed`: None stands for a random seed, set at admission.
    - `max_tokens`: None means up to the context length.
    - `logprobs`: the log-probabilities of the chosen token and of this many most likely tokens (0: the chosen
      token only).
    - `allowed_token_ids`: if not empty, only these tokens can be chosen.
    - `grammar`: constrains the form of the output.
    - `speculation`: limits speculation; `slo`: latency targets. Neither changes the text.
    - `pooling`: the output is a vector, of a model that embeds or scores.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    grammar: Grammar | None = None
    speculation: SpeculationLimits = SpeculationLimits()
    slo: Slo = NO_SLO
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        """Raise InvalidField for the first field that is out of range for every vocabulary, InvalidFieldType
        for a field of a wrong type."""
        for name in ("stop", "stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, tuple):
                try:
                    items = (value,) if isinstance(value, str) else tuple(value or ())
                except TypeError:
                    raise InvalidFieldType(name, f"must be a list, got {value!r}") from None
                msgspec.structs.force_setattr(self, name, items)
        if self.logit_bias is None:
            msgspec.structs.force_setattr(self, "logit_bias", {})
        for name, kind in (("logit_bias", dict), ("speculation", SpeculationLimits), ("slo", Slo)):
            if not isinstance(getattr(self, name), kind):
                raise InvalidFieldType(name, f"must be a {kind.__name__}, got {getattr(self, name)!r}")
        _check_ranges(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether penalties make the choice of a token depend on earlier tokens, besides the model's
        logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def _whole(name: str, value: float | None) -> None:
    if isinstance(value, float):
        raise InvalidField(name, f"must be an integer, got {value}")


def _between(name: str, value: float, low: float, high: float, entry: str = "") -> None:
    if not isinstance(value, int | float):
        raise InvalidFieldType(name, f"must be a number, got {value!r}", entry)
    finite = isinstance(value, int) or math.isfinite(value)
    if not (finite and low <= value <= high):
        raise InvalidField(name, f"must be between {plain(low)} and {plain(high)}, got {value}", entry)


def check_types(params: SamplingParams) -> SamplingParams:
    """Return `params` with each field as its declared type: Python code may have given others. Raises
    msgspec.ValidationError for the first field that has no such type or is out of range."""
    return msgspec.convert(_fields(params), SamplingParams)


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a struct by name, with nested structs as mappings too: `convert` does not look
    into a struct."""
    return {
        name: _fields(value) if isinstance(value, msgspec.Struct) else value
        for name, value in msgspec.structs.asdict(struct).items()
    }


def check_sampling(params: SamplingParams, vocab_size: int, eos_token_ids: tuple[int, ...] = ()) -> None:
    """Raise InvalidField for the first field out of range for a vocabulary of `vocab_size` tokens. The other
    ranges were checked when `params` were constructed."""
    _check_tokens(params, vocab_size)
    _check_allowed(params, vocab_size, eos_token_ids)
    if params.grammar is not None:
        _check_grammar(params, params.grammar)


def _check_ranges(params: SamplingParams) -> None:
    """Raise InvalidField for the first field that is out of range for every vocabulary, or that must be an
    integer and is not; InvalidFieldType if a field that must be a number is not."""
    for name in INTEGERS:
        _whole(name, getattr(params, name))
    _between("n", params.n, 1, MAX_CHOICES)
    _between("temperature", params.temperature, 0.0, 100.0)
    if 0.0 < params.temperature < 1e-3:
        raise InvalidField("temperature", f"must be 0 (greedy) or at least 0.001, got {params.temperature}")
    _between("top_k", params.top_k, -1, 2**31)
    _between("top_p", params.top_p, 0.0, 1.0)
    if params.top_p == 0.0:
        raise InvalidField("top_p", "must be above 0; use temperature 0 for greedy decoding")
    _between("min_p", params.min_p, 0.0, 1.0)
    _between("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _between("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _between("repetition_penalty", params.repetition_penalty, 1e-2, 100.0)
    if params.seed is not None:
        _between("seed", params.seed, 0, 2**64 - 1)
    if params.max_tokens is not None:
        _between("max_tokens", params.max_tokens, 0, 2**31)
    _between("min_tokens", params.min_tokens, 0, 2**31 if params.max_tokens is None else params.max_tokens)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None:
            _between(name, count, 0, MAX_LOGPROBS)
    _check_stops(params)
    _check_bias(params)
    if params.pooling and (params.max_tokens, params.n, params.prompt_logprobs) != (0, 1, None):
        raise InvalidField("pooling", "has no output: max_tokens must be 0, n 1, and prompt_logprobs None")
    if params.pooling and (params.pooling.kind == "logits") != bool(params.pooling.tokens):
        raise InvalidField("pooling", "must have tokens if its kind is logits, and only then")
    for name in ("max_depth", "max_nodes"):
        _whole(f"speculation.{name}", getattr(params.speculation, name))
    _between("speculation.max_depth", params.speculation.max_depth, 1, MAX_SPECULATION)
    _between("speculation.max_nodes", params.speculation.max_nodes, 1, MAX_SPECULATION)
    for name in ("tpot_ms", "ttft_ms"):
        target = getattr(params.slo, name)
        if target is not None and not 0.0 < target < math.inf:
            raise InvalidField(f"slo.{name}", f"must be above 0 and finite, got {target}")


def _check_tokens(params: SamplingParams, vocab_size: int) -> None:
    for name, tokens in (
        ("stop_token_ids", params.stop_token_ids),
        ("pooling", params.pooling.tokens if params.pooling else ()),
        ("logit_bias", params.logit_bias),
    ):
        for token in tokens:
            if not 0 <= token < vocab_size:
                named = f"token {token}" if name == "pooling" else token
                raise InvalidField(name, f"contains {named}, but the vocabulary has {vocab_size} tokens")


def check_biases(count: int) -> None:
    """Raise InvalidField if a logit_bias has too many tokens."""
    if count > MAX_LOGIT_BIAS:
        raise InvalidField("logit_bias", f"may contain at most {MAX_LOGIT_BIAS} tokens, got {count}")


def _check_bias(params: SamplingParams) -> None:
    check_biases(len(params.logit_bias))
    for token, bias in params.logit_bias.items():
        _between("logit_bias", bias, -100.0, 100.0, f"[{token}]")


def _check_grammar(params: SamplingParams, grammar: Grammar) -> None:
    if params.allowed_token_ids:
        raise InvalidField("allowed_token_ids", "cannot be combined with a grammar")
    complaint = _complaint(grammar)
    if complaint:
        raise InvalidField("grammar", complaint)


@lru_cache(maxsize=16)
def _complaint(grammar: Grammar) -> str:
    """Return why a grammar is invalid; "" if it is valid. Cached: checking a large grammar takes
    milliseconds, and each prompt of a request has the same one."""
    try:
        check_grammar(grammar)
    except ValueError as error:
        return str(error)
    return ""


def _check_allowed(params: SamplingParams, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
    allowed = params.allowed_token_ids
    if len(allowed) > MAX_ALLOWED_TOKENS:
        raise InvalidField(
            "allowed_token_ids", f"may contain at most {MAX_ALLOWED_TOKENS}, got {len(allowed)}"
        )
    if allowed and (min(allowed) < 0 or max(allowed) >= vocab_size):
        wrong = next(token for token in allowed if not 0 <= token < vocab_size)
        raise InvalidField(
            "allowed_token_ids", f"contains {wrong}, but the vocabulary has {vocab_size} tokens"
        )
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    if params.min_tokens > 0 and allowed and ends.issuperset(allowed):
        raise InvalidField(
            "allowed_token_ids", "contains only tokens that end the text, which min_tokens forbids"
        )


def _is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode the text: it has no lone surrogates."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _check_stops(params: SamplingParams) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidField("stop", f"may contain at most {MAX_STOP_STRINGS} strings, got {len(params.stop)}")
    for text in params.stop:
        if isinstance(text, str) and not _is_unicode(text):
            raise InvalidField("stop", f"strings must have no lone surrogates, got {text!r}")
        if not 0 < len(text) <= MAX_STOP_LENGTH:
            raise InvalidField(
                "stop", f"strings must have 1 to {MAX_STOP_LENGTH} characters, got {len(text)}"
            )
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidField(
            "stop_token_ids", f"may contain at most {MAX_STOP_TOKENS}, got {len(params.stop_token_ids)}"
        )
