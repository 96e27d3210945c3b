"""Writing a model's shards copies its other files."""

from pathlib import Path

from streamserve.execution.formats.shards import copy_other_files

COPIED = ["tokenizer.json", "chat_template.jinja", "LICENSE", "additional_chat_templates/tool_use.jinja"]


def test_tokenizer_templates_and_licenses_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name in [*COPIED, "model.safetensors", "modeling.py"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    target.mkdir()
    copy_other_files(source, target)
    files = [path for path in target.rglob("*") if path.is_file()]
    assert {str(path.relative_to(target)) for path in files} == set(COPIED)
    assert all(path.read_text() == str(path.relative_to(target)) for path in files)
