"""Change entries of a GGUF file."""

from collections.abc import Callable
from typing import Any

import gguf


def entry(key: str, value: Any) -> Callable[[gguf.GGUFWriter], None]:
    """Return a function that sets an entry; None removes it."""

    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        kinds = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        if value is not None:
            kinds.get(type(value), writer.add_array)(key, value)

    return change
