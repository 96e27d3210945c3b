"""A Griffe extension: brackets in docstrings are shapes like `[layer][block]`, not cross-references."""

import re
from typing import Any

import griffe


class PlainBrackets(griffe.Extension):
    """Escape the opening bracket of each further index outside of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            parts = re.split(r"(`[^`]*`)", obj.docstring.value)
            obj.docstring.value = "".join(
                part if part.startswith("`") else part.replace("][", "]\\[") for part in parts
            )
