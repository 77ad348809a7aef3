"""Authentication of the ranks: a handshake by a shared secret, then a store that takes only their values.

torch's TCPStore listens on all interfaces and serves every client, which may list (since torch 2.13), read, replace and
delete its keys. In a test, another account took the place of rank 1. So nothing in it counts unless it carries a
message authentication code (HMAC-SHA256, RFC 2104) of a rank that knows the secret. An intruder can still read values,
and prevent a start. The handshake is the mutual challenge and response of ISO/IEC 9798-4; its nonces make the values of
an earlier attempt worthless, although a user's secret stays the same. A store of our own that authenticates connections
would be a Python server in the background of rank zero's training, for which NCCL's threads would wait.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from hpctrain.errors import RendezvousError
from hpctrain.phrases import numbered

ZERO_KEY = "hpctrain/zero"
NONCE_BYTES = 16
MAC_BYTES = 32
POLL_S = 0.01
"""Seconds between two checks for the other ranks; short, because waiting delays every start."""
LONGEST_PAUSE_S = 1.0
"""Seconds between two checks after a long wait, when a delay costs little and many ranks ask one store."""


class Seal:
    """Message authentication codes by a key.

    Args:
        key: the secret, or a result of `mac`.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def mac(self, *parts: bytes | str) -> bytes:
        """The code of these parts; 32 bytes."""
        # each part with its length: ("ab", "c") is another message than ("a", "bc")
        data = [part.encode() if isinstance(part, str) else part for part in parts]
        return hmac.digest(self._key, b"".join(len(part).to_bytes(8, "big") + part for part in data), "sha256")

    def unseal(self, sealed: bytes, *parts: bytes | str) -> bytes | None:
        """Return the value of a sealed message, which is its code followed by the value; None without that code."""
        value = sealed[MAC_BYTES:]
        return value if hmac.compare_digest(sealed[:MAC_BYTES], self.mac(*parts, value)) else None


class SealedStore(Store):
    """A store whose values carry the code of a rank; others are refused.

    gloo gets such a store, for the addresses of its peers: it asks for few keys, in the thread that makes the call.
    Counters (`add`) aren't authenticated: an intruder can let a barrier pass early, or not at all.

    Args:
        inner: the store to which others may have access.
        seal: by a key that only the ranks know.
    """

    def __init__(self, inner: Store, seal: Seal) -> None:
        super().__init__()
        self.inner = inner
        self._seal = seal

    def unsealed(self) -> PrefixStore:
        """The inner store under a prefix that only the ranks can derive, though every client can list it."""
        return PrefixStore(self._seal.mac("prefix").hex(), self.inner)

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value with its code."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        _set(self.inner, key, self._seal.mac(key, data) + data)

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it.

        Raises:
            RendezvousError: no rank of this attempt has stored it.
        """
        value = self._seal.unseal(self.inner.get(key), key)
        if value is None:
            raise RendezvousError(
                f"no rank of this attempt wrote the value of {key} in the store: another program writes to the store"
            )
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
        return self.inner.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return self.inner.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self.inner.wait(list(keys)) if timeout is None else self.inner.wait(list(keys), timeout)


class Handshake:
    """The ranks of one attempt prove to each other that they know its secret.

    Rank zero publishes a nonce with its proof, by which the others recognise its store among those of other programs.
    Each of them answers with its own nonce and proof, and is welcomed with a proof over both nonces. The key of
    the `SealedStore` follows from the secret and rank zero's nonce.

    Args:
        secret: of the attempt, or of the user.
        token: what distinguishes this attempt from others with the same secret.
    """

    def __init__(self, secret: bytes, token: str) -> None:
        self._seal = Seal(secret)
        self._token = token

    @property
    def name(self) -> str:
        """A name for this attempt's file, which reveals nothing."""
        return self._seal.mac("file", self._token).hex()[:16]

    def announce(self, store: Store) -> bytes:
        """Publish rank zero's nonce, and return it."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        _set(store, ZERO_KEY, self._seal.mac("zero", self._token, nonce) + nonce)
        return nonce

    def recognise(self, store: Store) -> bytes | None:
        """Rank zero's nonce; None if the store isn't of this attempt's rank zero."""
        return self._unseal_value(store, ZERO_KEY, "zero", self._token)

    def welcome(self, store: Store, zero: bytes, ranks: Sequence[int], timeout_s: float) -> SealedStore:
        """Wait for all other ranks, as rank zero.

        Args:
            store: to which others may have access.
            zero: the nonce that was announced. Never read again: an intruder may have replaced it since.
            ranks: the other ranks.
            timeout_s: bound in seconds on the wait.

        Raises:
            RendezvousError: some didn't come in time; names them.
        """
        deadline = time.monotonic() + timeout_s
        waiting = list(ranks)
        while True:
            # all in one look: each look at a file locks it, and the ranks that arrive wait for the lock
            arrived = tuple(waiting) if store.check([_key(rank) for rank in waiting]) else ()
            for rank in arrived:
                # without the code, it is of an intruder or an earlier attempt: the rank itself will replace it
                nonce = self._unseal_value(store, _key(rank), "rank", self._token, str(rank), zero)
                if nonce is not None:
                    answer = self._seal.mac("welcome", self._token, str(rank), zero, nonce)
                    _set(store, f"{_key(rank)}/welcome", answer)
                    waiting.remove(rank)
            if not waiting:
                return self._seal_store(store, zero)
            if time.monotonic() > deadline:
                missing = [rank for rank in waiting if not store.check([_key(rank)])] or waiting
                problem = f"{numbered('rank', missing)} did not arrive within {timeout_s:.0f} s; check their logs"
                raise RendezvousError(problem, waited=True)
            time.sleep(POLL_S)

    def introduce(
        self, store: Store, zero: bytes, rank: int, timeout_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> SealedStore:
        """Prove this rank's knowledge to rank zero, and wait until it has proved its own.

        Args:
            store: to which others may have access.
            zero: rank zero's nonce, which was recognised. Never read again: an intruder may have replaced it since.
            rank: of this process.
            timeout_s: bound in seconds on the wait.
            is_over: whether rank zero won't answer any more, because the nonce is of an earlier start.

        Raises:
            RendezvousError: rank zero didn't answer in time, or gave a wrong answer.
        """
        nonce, welcome = secrets.token_bytes(NONCE_BYTES), f"{_key(rank)}/welcome"
        try:
            _set(store, _key(rank), self._seal.mac("rank", self._token, str(rank), zero, nonce) + nonce)
            wait_for_key(store, welcome, timeout_s, is_over)
        except (RuntimeError, TimeoutError) as error:  # torch raises the former if rank zero and its store are gone
            raise RendezvousError(
                f"rank zero did not answer rank {rank} within {timeout_s:.0f} s; check its log", waited=True
            ) from error
        expected = self._seal.mac("welcome", self._token, str(rank), zero, nonce)
        if not hmac.compare_digest(store.get(welcome), expected):
            raise RendezvousError(f"this attempt's rank zero did not write the answer to rank {rank} in the store")
        return self._seal_store(store, zero)

    def _unseal_value(self, store: Store, key: str, *parts: bytes | str) -> bytes | None:
        return self._seal.unseal(store.get(key), *parts) if store.check([key]) else None

    def _seal_store(self, store: Store, zero: bytes) -> SealedStore:
        return SealedStore(store, Seal(self._seal.mac("session", self._token, zero)))


def _key(rank: int) -> str:
    return f"hpctrain/rank/{rank}"


def wait_for_key(store: Store, key: str, timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
    """Wait for a key by looking for it: in torch's own wait, Python handles no signal, not even a second Ctrl-C.

    Raises:
        TimeoutError: it didn't come in time, or won't come.
        RuntimeError: from torch, if the store is gone.
    """
    begin = time.monotonic()
    while not store.check([key]):
        waited_s = time.monotonic() - begin
        if waited_s > timeout_s or is_over():
            raise TimeoutError
        time.sleep(min(LONGEST_PAUSE_S, max(POLL_S, waited_s / 20)))


def _set(store: Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # it takes bytes, too, which torch's annotation leaves out
