"""Known fields of other servers' embeddings, scores and reranking."""

from streamserve.api.http.ignored_fields import OtherFields

OTHER_IN_POOLING = OtherFields(
    refused={
        "activation": (),
        "chat_template": (),
        "embed_dtype": ("float32",),
        "embedding_types": (["float"],),
        "endianness": ("native", "little"),
        "input_type": (),
        "late_chunking": (False,),
        "max_tokens_per_doc": (),
        "messages": (),
        "mm_processor_kwargs": ({},),
        "normalize": (True,),
        "softmax": (),
        "task": (),
        "truncate": (),
        "truncation": (False,),
        "truncation_side": (),
        "use_activation": (True,),
    },
    without_effect={"request_id": (), "extra_body": ({},)},
)
"""Fields of other servers' embeddings, scores and reranking that are not obeyed."""
