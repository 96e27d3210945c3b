"""The kinds of drafters by the values of `--draft`."""

import pytest

from streamserve.protocol.draft_kind import DraftKind, draft_kind


@pytest.mark.parametrize(
    ("draft", "kind"),
    [
        ("auto", DraftKind.AUTO),
        ("none", DraftKind.NONE),
        ("ngram", DraftKind.NGRAM),
        ("self:2", DraftKind.FIRST_LAYERS),
        ("tcp://127.0.0.1:7000,tcp://127.0.0.1:7001", DraftKind.SERVICE),
        ("Qwen/Qwen3-0.6B", DraftKind.MODEL),
        ("folder/model.gguf", DraftKind.MODEL),
        ("self", DraftKind.MODEL),
        ("service", DraftKind.MODEL),
    ],
)
def test_a_draft_is_a_word_a_prefix_or_a_model(draft, kind):
    assert draft_kind(draft) is kind
