"""Smooth weighted round robin: of 9 turns by 8:1 the slow one gets one, in the middle and not at the end."""

from collections.abc import Mapping


class Turns:
    """Whose turn it is, for any number of encoders that come and go."""

    def __init__(self) -> None:
        self._credit: dict[str, int] = {}

    def take(self, weights: Mapping[str, int]) -> str:
        """Return who is next among ``weights`` (id -> weight); where all weigh nothing, they weigh the same.

        Raises ``ValueError`` without anyone. Equal credit goes to the smallest id, so routers of one history agree.
        """
        if not weights:
            raise ValueError("nobody to take a turn")
        shares = dict(weights) if any(weights.values()) else dict.fromkeys(weights, 1)
        for encoder, share in shares.items():
            self._credit[encoder] = self._credit.get(encoder, 0) + share
        chosen = min((e for e in shares if shares[e]), key=lambda e: (-self._credit[e], e))
        self._credit[chosen] -= sum(shares.values())
        return chosen

    def forget(self, encoder: str) -> None:
        """It left; the credit of the others stays."""
        self._credit.pop(encoder, None)
