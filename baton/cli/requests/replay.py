"""`baton replay`: verify receipts, compute their answers again, and compare all bits.

Exit codes: 0 if all are equal, 1 if an answer differs, 2 if a receipt could not be verified or computed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from baton.cli import options
from baton.errors import BatonError, ConfigError, EngineFault, InvalidRequest, NoWorker
from baton.limits import MAX_PRIORITY

if TYPE_CHECKING:
    from baton.cli.requests.receipt_files import PromptFile, Source
    from baton.client import AsyncClient, Options
    from baton.receipts.compare import Difference, Replayed
    from baton.receipts.form import Receipt
    from baton.receipts.keys import PublicKeys

UNCHECKED = "signatures are not checked: set --public-key to the public key of the routers"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one receipt: equal, verified (with --verify-only), differs or error."""

    place: str
    request_id: str
    result: str
    difference: Difference | None = None
    error: str = ""
    signature: str = "unchecked"  # or "checked": it is valid

    def __str__(self) -> str:
        about = self.difference or self.error
        return f"{self.place}: {self.result}" + (f": {about}" if about else "")


@dataclass(frozen=True, slots=True)
class Replay:
    """Replays on one cluster. `client` is None with --verify-only; `keys` is None if signatures are not checked."""

    client: AsyncClient | None
    keys: PublicKeys | None
    prompt: PromptFile | None

    async def all(self, sources: Sequence[Source], concurrency: int) -> list[Outcome]:
        """Return the outcomes in the order of `sources`, with at most `concurrency` requests at a time."""
        slots = asyncio.Semaphore(concurrency)

        async def one(source: Source) -> Outcome:
            async with slots:
                return await self._one(source)

        return list(await asyncio.gather(*map(one, sources)))

    async def _one(self, source: Source) -> Outcome:
        receipt = source.found
        if isinstance(receipt, InvalidRequest):
            return Outcome(source.place, "", "error", error=str(receipt))
        signature = "unchecked"
        try:
            if self.keys is not None:
                self.keys.check(receipt)
                signature = "checked"
            difference = await self._difference(receipt)
        except Exception as error:  # noqa: BLE001  (one bad receipt must not lose the outcomes of the others)
            return Outcome(
                source.place, receipt.request_id, "error", error=f"{type(error).__name__}: {error}", signature=signature
            )
        result = "verified" if self.client is None else "differs" if difference else "equal"
        return Outcome(source.place, receipt.request_id, result, difference, signature=signature)

    async def _difference(self, receipt: Receipt) -> Difference | None:
        from baton.receipts.compare import first_difference

        ids = await self._prompt_ids(receipt)
        if self.client is None:
            return None
        if ids is None:
            raise InvalidRequest.of("--prompt", "must be set, because the receipt has no opening.prompt_ids")
        return first_difference(receipt, await answered_again(self.client, receipt, ids))

    async def _prompt_ids(self, receipt: Receipt) -> list[int] | None:
        """Return the prompt of the receipt, or None if it is unknown. Raises InvalidRequest if a given one differs."""
        from baton.receipts import form

        if self.prompt is None:  # `form.parse` has compared this one with the digest
            return receipt.opening.prompt_ids if receipt.opening else None
        ids = self.prompt.ids
        if ids is None:
            if self.client is None:
                raise InvalidRequest.of("--prompt", "must have token ids with --verify-only, not a text")
            ids = await self.client.tokenize(self.prompt.text)
            if form.prompt_digest(ids) != receipt.prompt:  # editors add a newline
                ids = await self.client.tokenize(self.prompt.text.removesuffix("\n"))
        if form.prompt_digest(ids) != receipt.prompt:
            text = f"has another digest than receipt.prompt: {len(ids)} tokens, and {receipt.prompt.tokens} there"
            raise InvalidRequest.of("--prompt", text)
        return ids


async def answered_again(client: AsyncClient, receipt: Receipt, ids: Sequence[int]) -> list[Replayed]:
    """Return the choices, computed again without cached KV on workers with the receipt's fingerprint. Raises NoWorker
    with both fingerprints if no worker has it.
    """
    from baton.receipts import form
    from baton.receipts.compare import Replayed

    asked = receipt.parameters() | {"n": len(receipt.choices), "deterministic": True, "logprobs": 0}
    if (constraint := receipt.constraint) is not None:
        texts: Any = constraint.texts
        asked[constraint.kind] = texts if constraint.kind == "choices" else texts[0]
    # No cached block has this scope. The priority changes no bit, and lets other requests go first.
    given = cast("Options", asked | {"cache_scope": f"replay {token_hex(16)}", "priority": -MAX_PRIORITY})
    try:
        async with client.stream(ids, system_fingerprint=receipt.system_fingerprint, **given) as stream:
            answer = await stream.collect()
    except NoWorker as error:
        raise await _no_worker(client, receipt, ids, error) from error
    if answer.system_fingerprint != receipt.system_fingerprint:
        raise EngineFault(f"the cluster used workers with another fingerprint, {answer.system_fingerprint}")
    again = []
    for choice in answer.choices:
        end = choice.end_logprobs.logprob if choice.end_logprobs else None
        values = form.opened(choice.tokens, [each.logprob for each in choice.logprobs], end)
        reason = choice.finish_reason.value if choice.finish_reason else ""
        again.append(Replayed(values, reason, choice.matched_stop))
    return again


async def _no_worker(client: AsyncClient, receipt: Receipt, ids: Sequence[int], error: NoWorker) -> NoWorker:
    """Return the error with the fingerprint that the cluster has instead."""
    try:
        probe = await client.generate(ids[:1], max_tokens=1, deterministic=True)
    except BatonError:
        return error
    if probe.system_fingerprint == receipt.system_fingerprint:
        return error
    wanted = f"no worker has the receipt's fingerprint {receipt.system_fingerprint}"
    return NoWorker(f"{wanted}; workers of this cluster have {probe.system_fingerprint}")


def replay(  # noqa: PLR0913, PLR0917 (each is an option of the command)
    receipt: Annotated[Path, typer.Argument(metavar="RECEIPT", help="a file of receipts, JSON or JSONL, or a folder")],
    prompt: Annotated[
        Path | None, typer.Option(help="file of the prompt: a text, a list of token ids, or an answer of /tokenize")
    ] = None,
    public_key: Annotated[
        Path | None, typer.Option(help="PEM file of the routers' public keys (default: the local cluster's)")
    ] = None,
    verify_only: Annotated[
        bool, typer.Option("--verify-only", help="check signatures and digests, without a cluster")
    ] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at the same time")] = 8,
    timeout: options.Timeout = 120.0,
    name: options.ClusterName = None,
    target: options.Target = None,
    token: options.Token = None,
    tls: options.Tls = None,
    as_json: options.Json = False,
) -> None:
    """Verify receipts, compute their answers again, and report equal or the first position that differs."""
    from baton.cli.requests.receipt_files import PromptFile, read_sources
    from baton.cli.target import Router
    from baton.receipts.keys import PublicKeys

    if verify_only and public_key is None:
        raise InvalidRequest.of("--public-key", "must be set with --verify-only")

    async def run() -> list[Outcome]:
        given = PromptFile.read(prompt) if prompt else None
        sources = list(read_sources(receipt))
        if all(isinstance(source.found, InvalidRequest) for source in sources):  # a cluster cannot help
            return await Replay(None, None, given).all(sources, concurrency)
        keys = PublicKeys.read(public_key) if public_key else _local_keys(name, target)
        if verify_only:
            return await Replay(None, keys, given).all(sources, concurrency)
        async with Router(name, target, timeout, token, tls).async_client(max_retries=2) as replaying:
            return await Replay(replaying, keys, given).all(sources, concurrency)

    try:
        outcomes = asyncio.run(run())
    except Exception as error:  # noqa: BLE001  (1 is the code of a difference)
        typer.echo(f"baton: {type(error).__name__}: {error}", err=True)
        raise typer.Exit(2) from None
    _report(outcomes, as_json=as_json)


def _local_keys(name: str | None, target: str | None) -> PublicKeys | None:
    """Return the key of the local cluster, or None with a note if this user cannot read it."""
    from baton.cli.target import find_cluster
    from baton.cluster.state_dir import StateFolder
    from baton.config import load_config
    from baton.receipts.keys import ReceiptKey

    if target is None:
        file = load_config(StateFolder(find_cluster(name).name).config).security.receipt_key
        try:
            if file is not None:
                return ReceiptKey.read(file).public()
        except ConfigError as error:
            typer.echo(f"note: {error}", err=True)
    typer.echo(f"note: {UNCHECKED}", err=True)
    return None


def _report(outcomes: Sequence[Outcome], *, as_json: bool) -> None:
    """Print the outcomes and exit: each one of a single receipt, else those that are not equal, and the counts."""
    counts = Counter(outcome.result for outcome in outcomes)
    if as_json:
        typer.echo(json.dumps({"receipts": len(outcomes), **counts, "outcomes": list(map(asdict, outcomes))}))
    else:
        shown = [each for each in outcomes if not outcomes[1:] or each.result in {"differs", "error"}]
        typer.echo("\n".join(map(str, shown)) + "\n" * bool(shown), nl=False)
        parts = ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))
        typer.echo(f"{len(outcomes)} receipts: {parts}" if outcomes[1:] else "", nl=bool(outcomes[1:]))
    raise typer.Exit(2 if counts["error"] else 1 if counts["differs"] else 0)
