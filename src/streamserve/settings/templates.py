"""The chat template that the operator gives in place of the model's own."""

from pathlib import Path

from streamserve.settings.options import SettingsError

MAX_TEMPLATE_BYTES = 1 << 20


def read_chat_template(path: str | None) -> str | None:
    """Return the text of the file of a chat template; None if there is none. Raises SettingsError if it
    cannot be read."""
    if path is None:
        return None
    named, file = f"chat_template = {path!r:.200}", Path(path).expanduser()
    try:
        if not file.is_file():
            raise SettingsError(f"{named}: there is no such file: give a file with a Jinja template")
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise SettingsError(f"{named}: has more than {MAX_TEMPLATE_BYTES} bytes, which is the limit")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{named}: is not a text in UTF-8") from error
    except OSError as error:
        raise SettingsError(f"{named}: cannot be read: {error.strerror}") from error
