"""Request validation: refuse a request, or make its initial sequence."""

from streamserve.contracts.engine_config import EngineConfig
from streamserve.engine.sequence import DecodeClock, EngineSequence, KVState, PromptStreamState, Transfer
from streamserve.engine.status import TransferRole
from streamserve.protocol.messages import Event, Finished, ModelInfo, Phase, Submit
from streamserve.scheduling.feasibility import Load, infeasible

ROLES: dict[Phase, TransferRole] = {
    "both": TransferRole.LOCAL,
    "prefill": TransferRole.SENDER,
    "return": TransferRole.COPY,
    "decode": TransferRole.RECEIVER,
}
"""The role of a sequence in a KV transfer, by the phase of its request that this worker serves."""


def refusal(message: Submit, config: EngineConfig, model: ModelInfo, serves: bool) -> str:
    """Return why a request cannot run on this worker; empty if it can. `serves`: whether this worker serves
    the request's phase."""
    length = len(message.prompt) + max(map(len, message.outputs.values()), default=0)
    if not message.outputs or not (message.prompt or message.open):
        return "the prompt is empty"
    if message.open and message.params.prompt_logprobs is not None:
        return "prompt_logprobs is not available for a prompt stream"
    if length > config.max_model_len:
        return f"the prompt has {length} tokens, but the model's limit is {config.max_model_len}"
    if not serves:
        return f"this worker does not serve the {message.phase} phase of requests"
    if len(message.outputs) > config.max_num_seqs:
        return f"n is {len(message.outputs)}, but at most {config.max_num_seqs} sequences run at once"
    if any(not 0 <= choice < message.params.n for choice in message.outputs):
        return f"choices {sorted(message.outputs)} are not among {message.params.n}"
    token_lists = (message.prompt, *message.outputs.values())
    if any(not 0 <= token < model.vocab_size for tokens in token_lists for token in tokens):
        return f"the prompt holds a token outside the vocabulary of {model.vocab_size}"
    return ""


def may_be_infeasible(message: Submit) -> bool:
    """Whether SLO admission applies to the request on arrival. A request that has begun elsewhere is exempt,
    a cache copy has no targets, and a prompt stream is judged when it is finished."""
    return not (any(message.outputs.values()) or message.phase == "return" or message.open)


def infeasible_events(sequence: EngineSequence, load: Load) -> list[Event]:
    """Return the final events of a sequence without output whose latency targets are infeasible at this load;
    none if they are feasible. In a stream pair the prefill worker judges the target for the first token, the
    decode worker the target for further tokens."""
    slo, role = sequence.params.slo, sequence.transfer.role
    ttft = None if role is TransferRole.RECEIVER else slo.ttft_ms
    tpot = None if role.sends else slo.tpot_ms
    verdict = infeasible(ttft, tpot, sequence.pending, load)
    if verdict is None:
        return []
    missed, retry_after = verdict
    error = f"the latency targets cannot be met at present (slo_admission): {'; '.join(missed)}"
    return [
        Finished(sequence.request, sequence.attempt, choice, "error", error, 503, retry_after)
        for choice in sequence.choices
    ]


def final_events(message: Submit, error: str, status: int = 400) -> list[Event]:
    """Return a final event with the error for each choice."""
    return [
        Finished(message.request, message.attempt, choice, "error", error, status)
        for choice in message.outputs
    ]


def make_sequence(
    message: Submit,
    choices: tuple[int, ...],
    id: int,
    root: bytes,
    groups: int,
    survival: float,
    check: bool = False,
) -> EngineSequence:
    """Return the initial sequence of these choices of a request. `survival`: the share of a prompt stream
    that its edits are expected to retain. `check`: whether an illegal change of status raises."""
    return EngineSequence(
        id=id,
        submitted=message,
        choices=choices,
        params=message.params,
        prompt_length=len(message.prompt),
        tokens=message.prompt + message.outputs[choices[0]],
        kv=KVState(root, [0] * groups),
        clock=DecodeClock(message.began.get(choices[0])),
        stream=PromptStreamState(
            open=message.open,
            tail=message.tail,
            version=message.version,
            last_chunk_at=message.arrival,
            survival=survival,
        ),
        transfer=Transfer(ROLES[message.phase], hold=message.hold),
        prompt_logprobs_done=message.params.prompt_logprobs is None
        or 0 not in choices
        or message.phase == "decode",
        lookup_counted=message.rescheduled or message.phase == "decode",
        check=check,
    )
