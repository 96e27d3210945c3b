"""Fixtures of the API's tests, for the optional parts of the API."""

from tests.api.conftest import generator as generator
from tests.api.conftest import hello as hello
from tests.api.conftest import strict as strict
