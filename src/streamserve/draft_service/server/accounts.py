"""Resource use of each client of a draft service. All sessions with the same key share an account; without
keys every session has a separate one.

Time, KV blocks, stored sequences and ranks among the N_max targets are shared fairly by account: a client
that opens more sessions gets no larger share than a client that opens a single session.
"""

from dataclasses import dataclass


@dataclass(eq=False)
class Account:
    """The resource use of one client. `key` is the client's public key; empty without keys."""

    key: str = ""
    weight: float = 1.0
    virtual: float = 0.0
    """Virtual time: seconds of drafting received, divided by the account's weight. The account with the
    lowest virtual time is served next."""
    sessions: int = 0
    stored_bytes: int = 0
    """Bytes of the account's stored sequences and trees."""
    in_flight: int = 0
    """Number of the account's sequences with a tree in flight."""
    blocks: int = 0
    """Number of KV blocks of the account's sequences."""


class Accounts:
    """Accounts of clients that have a session, by key."""

    def __init__(self) -> None:
        self._by_key: dict[str, Account] = {}

    def open(self, key: str, weight: float) -> Account:
        """Return the account for a new session with `key`."""
        account = self._by_key.get(key) if key else None
        if account is None:
            account = Account(key, weight)
            if key:
                self._by_key[key] = account
        account.sessions += 1
        return account

    def of(self, key: str) -> Account | None:
        """Return the open account with `key`, or None. Sessions without a key are not found: each has a
        separate account."""
        return self._by_key.get(key)

    def close(self, account: Account) -> None:
        """Record that a session of `account` has ended."""
        account.sessions -= 1
        if not account.sessions and account.key:
            del self._by_key[account.key]
