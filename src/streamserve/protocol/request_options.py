"""The options of a request: everything besides its prompt and its sampling parameters."""

import msgspec


class RequestOptions(msgspec.Struct, frozen=True):
    """The options of a request.

    - `priority`: requests with a lower value are served first.
    - `cache_salt`: only requests with the same salt share cached prefixes.
    - `adapter`: the name of the LoRA adapter to use; empty: none.
    - `idempotency_key`: if it is set, workers on other machines keep the request's outputs when they lose the
      server. If the client repeats the request with this key at the server's successor, the kept outputs are
      not generated again.
    """

    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    idempotency_key: str = ""


NO_OPTIONS = RequestOptions()
