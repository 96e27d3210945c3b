"""What each client has of a draft service. All sessions that show one key share an account; without keys
every session has one to itself.

Time, KV blocks, texts and places among the N_max targets are shared out by account: a client that opens more
sessions gets no more of them than another that opens one.
"""

from dataclasses import dataclass


@dataclass(eq=False)
class Account:
    """A client's share. `key` is the public key it shows, empty without keys."""

    key: str = ""
    weight: float = 1.0
    virtual: float = 0.0
    """Seconds it was drafted for, by weight: the account with the least is served next."""
    sessions: int = 0
    held: int = 0
    """Bytes of the texts and trees that are kept for it."""
    in_flight: int = 0
    """Sequences for which trees are on their way."""
    blocks: int = 0
    """KV blocks that its sequences have."""


class Accounts:
    """Accounts of clients that have a session, by key."""

    def __init__(self) -> None:
        self._by_key: dict[str, Account] = {}

    def open(self, key: str, weight: float) -> Account:
        """The account for a new session that shows `key`."""
        account = self._by_key.get(key) if key else None
        if account is None:
            account = Account(key, weight)
            if key:
                self._by_key[key] = account
        account.sessions += 1
        return account

    def of(self, key: str) -> Account | None:
        """The account of sessions that show `key`; None if there are none, and without keys."""
        return self._by_key.get(key)

    def close(self, account: Account) -> None:
        """A session of `account` has ended."""
        account.sessions -= 1
        if not account.sessions and account.key:
            del self._by_key[account.key]
