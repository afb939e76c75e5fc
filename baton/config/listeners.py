"""What each listener needs before it may be reached from other machines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from baton.config.values import is_loopback

ENCRYPTED = "encryption of KV (security.tls, and transfer.transport: auto or grpc)"
PLAIN = "a listener that speaks TLS (this one has plain HTTP only)"
NEEDS: Mapping[str, tuple[str, ...]] = {
    "router.grpc": ("security.tls", "security.tokens"),
    "router.admin": ("security.tls", "security.tokens"),
    "router.http": ("security.tls", "security.tokens"),
    "router.metrics": (PLAIN,),
    "prefill.listen": ("security.tls",),  # a certificate of the cluster's is the credential there
    "decode.listen": ("security.tls",),
    "prefill.metrics": (PLAIN,),
    "decode.metrics": (PLAIN,),
    "transfer.transport": (ENCRYPTED,),
}
KEPT_IN = ("grpc", "shm", "cuda_ipc", "memory")  # KV by these is encrypted, or does not leave its machine


def parse_allowed(value: object) -> bool | tuple[str, ...]:
    """`security.allow_insecure`: all listeners, none, or those of a list. Raises ValueError saying what is allowed."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, (list, tuple)) or any(name not in NEEDS for name in value):
        raise ValueError(f"must be true, false, or a list of some of {', '.join(NEEDS)}")
    return tuple(value)


def encrypts(transport: str, allowed: bool | tuple[str, ...]) -> bool:
    """Whether `transport` takes an encrypted one between machines, if there are certificates and no word against it."""
    return transport == "auto" and allowed is not True and "transfer.transport" not in (allowed or ())


def unsafe(
    addresses: Mapping[str, str | None], given: Collection[str], allowed: bool | tuple[str, ...]
) -> Iterator[str]:
    """What is wrong with each listener that other machines reach. `given`: which of the needed keys are set."""
    for listener, address in addresses.items():
        if not address or is_loopback(address) or allowed is True or listener in (allowed or ()):
            continue
        lacking = [need for need in NEEDS[listener] if need not in given]
        if lacking:
            remedy = f"set security.allow_insecure: true, or [{listener}], if you mean it"
            yield f"{listener} ({address}): listens beyond this machine without {' and '.join(lacking)}; {remedy}"
