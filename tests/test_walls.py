"""The rooms keep their walls: who may import whom, and who stays free of tensors."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "streamserve"

ARROWS: dict[str, set[str]] = {
    "protocol": set(),
    "policy": set(),
    "engine": {"policy", "protocol"},
    "execution": {"engine.plan", "policy.tree", "policy.cost", "protocol"},
    "text": {"protocol"},
    "control": {"protocol", "policy"},
    "transfer": {"engine.transfer", "protocol"},
    "drafting": {"engine.blocks", "engine.plan", "policy", "protocol"},
    "workers": {"drafting", "engine", "execution", "policy", "text", "transfer", "protocol"},
    "simulate": {"control", "engine", "policy", "protocol"},
    "api": {"control", "text", "protocol"},
    "bench": set(),
    "embedded": set(),
}
"""What each room may import of the others. The package itself (the version) is open to all."""

POLICY_LIBRARIES = set(sys.stdlib_module_names) | {"numpy", "msgspec", "streamserve"}


def imports(file: Path) -> set[str]:
    """Modules that a file imports anywhere in it, dotted."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: imports are absolute"
            found.add(node.module or "")
    return found


def files(room: str) -> list[Path]:
    found = sorted((SOURCE / room).rglob("*.py"))
    assert found, f"there is no room {room}"
    return found


def test_every_room_has_its_arrows() -> None:
    rooms = {folder.name for folder in SOURCE.iterdir() if list(folder.glob("*.py"))}
    assert rooms == set(ARROWS)


@pytest.mark.parametrize("room", ARROWS)
def test_rooms_import_only_along_the_arrows(room: str) -> None:
    allowed = ARROWS[room] | {room}
    for file in files(room):
        for module in imports(file):
            if module.startswith("streamserve."):
                inside = module.removeprefix("streamserve.")
                assert any(inside == name or inside.startswith(name + ".") for name in allowed), (
                    f"{file.relative_to(SOURCE)} imports {module}"
                )


@pytest.mark.parametrize(
    "room", ["protocol", "policy", "engine", "drafting", "control", "api", "simulate", "text", "bench"]
)
def test_torch_stays_out(room: str) -> None:
    lazily = {"text/tokenizer.py": {"transformers"}}  # for folders without a tokenizer.json
    for file in files(room):
        heavy = {module.partition(".")[0] for module in imports(file)} & {"torch", "transformers"}
        assert heavy <= lazily.get(str(file.relative_to(SOURCE)), set())


def test_a_client_process_never_loads_torch() -> None:
    code = "import sys, streamserve.llm, streamserve.serving; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_policies_are_pure() -> None:
    for file in files("policy"):
        for module in imports(file):
            assert module.partition(".")[0] in POLICY_LIBRARIES
            assert module not in {"time", "random", "os", "socket", "asyncio"}


def test_nothing_is_unpickled_or_evaluated() -> None:
    for file in sorted(SOURCE.rglob("*.py")):
        assert not {m.partition(".")[0] for m in imports(file)} & {
            "pickle",
            "dill",
            "cloudpickle",
            "marshal",
            "shelve",
        }
        calls = {
            node.func.id
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not calls & {"eval", "exec", "compile"}, file
