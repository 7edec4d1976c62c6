"""Who may run the canary of an epoch, and what came of it (docs/exactness.md). Pure; no I/O."""

from dataclasses import dataclass, field

from mmrouter_lib.feed import Accepted, CanaryClaim, CanaryReport, CanaryResult, ClaimAnswer, Refused

MAX_LEASE_S = 120.0


@dataclass(slots=True)
class Canaries:
    """One epoch's canary: one router at a time holds the claim, and the first definite result stands to the end."""

    epoch: int
    result: CanaryReport | None = None
    _holder: str = ""
    _until: float = field(default=0.0)

    def begin(self, epoch: int) -> None:
        """A new epoch begins: nothing is known of it."""
        self.epoch, self.result, self._holder, self._until = epoch, None, "", 0.0

    def claim(self, ask: CanaryClaim, now: float) -> ClaimAnswer | Refused:
        """Grant the claim when nobody else holds it and no definite result is known. ``now`` is monotonic seconds."""
        if ask.epoch != self.epoch:
            return Refused(ask.id, f"epoch {ask.epoch} is not the present one, {self.epoch}")
        if self._decided:
            return ClaimAnswer(ask.id, False, self.result.router if self.result else "")
        if self._holder not in ("", ask.router) and now < self._until:
            return ClaimAnswer(ask.id, False, self._holder)
        self._holder, self._until = ask.router, now + min(max(ask.lease_s, 0.0), MAX_LEASE_S)
        return ClaimAnswer(ask.id, True, ask.router)

    def report(self, answer: CanaryResult, now: float) -> Accepted | Refused:
        """Take a result from the router that holds the claim (or held it last, when nobody else does)."""
        canary = answer.canary
        if canary.epoch != self.epoch:
            return Refused(answer.id, f"epoch {canary.epoch} is not the present one, {self.epoch}")
        if self._decided:
            return Refused(answer.id, "this epoch has its result already")
        if self._holder != canary.router:
            holder = f"{self._holder} holds it" if self._holder and now < self._until else "nobody holds it"
            return Refused(answer.id, f"{canary.router} does not hold the claim: {holder}")
        self.result, self._holder, self._until = canary, "", 0.0
        return Accepted(answer.id)

    @property
    def _decided(self) -> bool:
        return self.result is not None and self.result.result != "Unknown"
