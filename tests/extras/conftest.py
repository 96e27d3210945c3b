"""Fixtures of the API's tests for the optional parts of the API."""

from tests.api.conftest import checkpoint as checkpoint
from tests.api.conftest import generator as generator
from tests.api.conftest import hello as hello
from tests.api.conftest import server as server
from tests.api.conftest import strict as strict
from tests.api.conftest import tokenizer as tokenizer
