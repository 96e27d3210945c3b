"""Loading a repository downloads the right files."""

import pytest

from streamserve.hub.files import folder_files
from streamserve.hub.names import parse_hub_name

MODEL = ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("file", "loaded"),
    [
        ("chat_template.jinja", True),
        ("additional_chat_templates/tool_use.jinja", True),
        ("1_Pooling/config.json", True),
        ("onnx/config.json", False),
        ("additional_chat_templates/old/rag.jinja", False),
        ("README.txt", False),
    ],
)
def test_texts_in_folders(file: str, loaded: bool) -> None:
    name = parse_hub_name("owner/model")
    assert name is not None
    assert (file in folder_files(name, [*MODEL, file])) == loaded
