"""The arguments of a tool call as an object, which chat templates and Anthropic's API expect.

A model may write arguments that are no JSON object, and its output may end within them. Clients send such
replies back. The text is then kept under a key, so that the model sees what it wrote.
"""

import json
import math
from typing import Any, NoReturn

from streamserve.api.http.json_scan import MAX_DEPTH, JsonScan
from streamserve.api.http.memory import Charge
from streamserve.protocol.errors import RequestError
from streamserve.text.surrogates import well_formed

INVALID = "invalid_json"
"""The key for the text of arguments that are not a JSON object."""

_AROUND = 8
"""Levels of a request's JSON around the arguments of a call."""


def arguments_object(text: str) -> dict[str, Any]:
    """Return the arguments in `text` as an object, which is empty without a text, and for null or blanks.

    A text that is not a JSON object is returned under the key `INVALID`. So is a JSON object with more values
    or levels than a request may have.
    """
    scan = JsonScan()
    try:
        scan.feed(_bytes(text))
    except RequestError:
        return {INVALID: text}
    return _object(text, scan)


def charged_arguments(text: str, charge: Charge) -> dict[str, Any]:
    """Return the arguments of a request as `arguments_object` does, and charge their memory to `charge`.

    Raises RequestError if they have more values than a request may have.
    """
    scan = JsonScan()
    try:
        scan.feed(_bytes(text))
    except RequestError:
        if scan.depth <= MAX_DEPTH:
            raise
    charge.add(scan.decoded_bytes)
    return _object(text, scan)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _object(text: str, scan: JsonScan) -> dict[str, Any]:
    if scan.depth > MAX_DEPTH - _AROUND:
        return {INVALID: text}
    try:
        arguments = json.loads(text if text.strip() else "{}", parse_constant=_refuse, parse_float=_finite)
        if "\\ud" in text.lower():  # half of a surrogate pair is no character: no tokenizer takes it
            arguments = json.loads(well_formed(json.dumps(arguments, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return {INVALID: text}
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    return arguments if isinstance(arguments, dict) else {INVALID: text}


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)
