"""The open calls of a conversation, against a list of them."""

from hypothesis import given
from hypothesis import strategies as st

from streamserve.api.openai.open_calls import OpenCalls

IDS, FUNCTIONS = st.sampled_from("abc"), st.sampled_from("fg")


@given(st.lists(st.tuples(IDS, FUNCTIONS) | IDS, max_size=20))
def test_they_are_in_the_order_of_a_list(operations: list[tuple[str, str] | str]) -> None:
    """A tuple adds a call, an id removes all calls with this id."""
    calls, expected = OpenCalls(), list[tuple[str, str]]()
    for operation in operations:
        if isinstance(operation, tuple):
            calls.add(*operation)
            expected.append(operation)
        else:
            calls.close(operation)
            expected = [call for call in expected if call[0] != operation]
        assert calls.first() == next((call for call, _ in expected), None)
        for function in "fgh":
            assert calls.first(function) == next((call for call, name in expected if name == function), None)
