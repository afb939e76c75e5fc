"""The cached prefix of each worker, as a test compares it."""

from collections.abc import Iterable

from baton.ledger.prefix_index import Holder, PrefixIndex


def holders(index: PrefixIndex, digests: Iterable[bytes]) -> dict[Holder, int]:
    """Return the number of leading cached blocks of this chain per worker, without workers that have none."""
    levels = index.leading(digests)
    return {holder: count for bits, count in levels for holder in index._held if bits >> index.slot(holder) & 1}
