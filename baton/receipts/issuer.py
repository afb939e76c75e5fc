"""The router's side of receipts: one signed receipt about all choices of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core import Finish, SequenceSpec, TokenLogprobs
from baton.errors import EngineFault
from baton.limits import MAX_OPENED_TOKENS
from baton.receipts import form
from baton.receipts.form import ChoiceDigest, OpenedChoice, Opening, Receipt
from baton.receipts.keys import ReceiptKey


@dataclass(frozen=True, slots=True)
class ComputedChoice:
    """One choice as its workers computed it. `logprobs` has one entry per token."""

    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish: Finish | None

    def opened(self) -> OpenedChoice:
        """Return its values. Raises EngineFault if some are missing."""
        if self.finish is None or len(self.tokens) != len(self.logprobs):
            found = f"{len(self.logprobs)} log-probabilities for {len(self.tokens)} tokens"
            raise EngineFault(f"a choice cannot have a receipt: the workers sent {found}")
        end = self.finish.logprobs.logprob if self.finish.logprobs else None
        return form.opened(self.tokens, [each.logprob for each in self.logprobs], end)


@dataclass(frozen=True, slots=True)
class Issuer:
    """Signs the receipts of a router, with its `key` and the name of its model."""

    key: ReceiptKey
    model: str

    def issue(
        self, request_id: str, spec: SequenceSpec, fingerprint: str, choices: Sequence[ComputedChoice], now_s: float
    ) -> str:
        """Return a signed receipt as JSON. Its opening has the choices, up to `MAX_OPENED_TOKENS` tokens in total.
        `now_s` is in seconds since 1970. Raises EngineFault if workers left out a log-probability or a fingerprint.
        """
        if not fingerprint:
            raise EngineFault("a choice cannot have a receipt: its workers report different fingerprints, or none")
        opened = [choice.opened() for choice in choices]
        short = sum(len(each.ids) for each in opened) > MAX_OPENED_TOKENS
        receipt = Receipt(
            version=1,
            request_id=request_id,
            issued_at=int(now_s),
            model=self.model,
            system_fingerprint=fingerprint,
            prompt=form.prompt_digest(spec.prompt),
            sampling=form.sampling_to_json(spec.sampling),
            constraint=form.constraint_part(spec.constraint),
            choices=[_digest(each, choice.finish) for each, choice in zip(opened, choices, strict=True)],
            key="",
            signature="",
            opening=None if short else Opening(choices=opened),
        )
        return self.key.sign(receipt).text()


def _digest(opened: OpenedChoice, finish: Finish | None) -> ChoiceDigest:
    if finish is None:
        raise EngineFault("a choice cannot have a receipt: it has no end")
    matched, reason = finish.matched, finish.reason
    return ChoiceDigest(tokens=len(opened.ids), sha256=opened.sha256(), finish_reason=reason, matched_stop=matched)
