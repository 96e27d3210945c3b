"""Commands read UTF-8 even in a locale that has only ASCII."""

import os
import subprocess
import sys
from pathlib import Path

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "streamserve", *arguments]
    done = subprocess.run(command, env=os.environ | ASCII, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def test_settings_are_read(tmp_path: Path) -> None:
    file, keys = tmp_path / "settings.toml", tmp_path / "keys"
    keys.write_text("# für alle\na-key\n", encoding="utf-8")
    file.write_text(f'served_model_name = ["modèle"]\napi_key_file = "{keys}"\n', encoding="utf-8")
    printed = run("serve", "embedded", "--config", str(file), "--print-config")
    assert 'served_model_name = ["mod\\u00e8le"]' in printed


def test_the_doctor_reports_what_it_finds() -> None:
    assert "a server can start here" in run("doctor", "--port", "0")
