"""`baton certs`: a private CA and a certificate for all processes of a cluster, for tests and first use."""

from __future__ import annotations

import ipaddress
import re
import secrets
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from baton.errors import ConfigError

HERE = ("localhost", "127.0.0.1", "::1")
CA_DAYS = 3650
OPENSSL_S = 30.0
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9-]{0,62})(\.[A-Za-z0-9]([A-Za-z0-9-]{0,62}))*")
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")

Hosts = Annotated[list[str] | None, typer.Option(help="name or address of a host; may be repeated")]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="where the files are written")]
Days = Annotated[int, typer.Option(min=1, help="validity of the certificate in days")]


def certs(folder: Folder, host: Hosts = None, days: Days = 365) -> None:
    """Make a CA and a cluster certificate for `security.tls`. A second run makes a new certificate of the same CA."""
    from baton.config.schema import TlsConfig
    from baton.config.tls_check import check_tls

    names = list(dict.fromkeys([*HERE, *(host or [])]))
    extensions = _extensions(names)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _make(folder, Path(scratch), extensions, days)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write there: {error.strerror}") from None
    made = check_tls(TlsConfig.model_validate({part: f"{folder}/{part}.pem" for part in ("cert", "key", "ca")}))
    typer.echo(f"{folder}/cert.pem is for {', '.join(names)}, until {made.until if made else '?'}")
    typer.echo(f"  processes of the cluster   security: {{tls: {folder}}}")
    typer.echo(f"  clients                    {folder}/ca.pem")
    typer.echo(f"  secret                     {folder}/key.pem, {folder}/ca-key.pem")


def _make(folder: Path, scratch: Path, extensions: str, days: int) -> None:
    ca, ca_key = folder / "ca.pem", folder / "ca-key.pem"
    if ca.exists() != ca_key.exists():  # a new CA would not be trusted by those that have the old one
        there, lost = (ca, ca_key) if ca.exists() else (ca_key, ca)
        raise ConfigError(f"{lost}: missing, but {there.name} is there; bring it back, or use an empty folder")
    if not ca.exists():
        new, new_key = scratch / ca.name, scratch / ca_key.name
        usage = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign")
        added = [part for extension in usage for part in ("-addext", extension)]
        subject = ("-subj", f"/CN=Baton CA {secrets.token_hex(4)}", "-days", str(CA_DAYS))
        _openssl("req", "-x509", *_KEY, *subject, *added, "-keyout", new_key, "-out", new)
        new_key.replace(ca_key)
        new.replace(ca)
    request, key, cert = scratch / "request.pem", scratch / "key.pem", scratch / "cert.pem"
    (scratch / "extensions").write_text(extensions, encoding="ascii")
    _openssl("req", "-new", *_KEY, "-subj", "/CN=Baton", "-keyout", key, "-out", request)
    signer = ("-CA", ca, "-CAkey", ca_key, "-set_serial", f"0x{secrets.token_hex(16)}", "-days", str(days))
    _openssl("x509", "-req", "-in", request, *signer, "-extfile", scratch / "extensions", "-out", cert)
    key.replace(folder / key.name)
    cert.replace(folder / cert.name)


def _extensions(names: Sequence[str]) -> str:
    """Return the certificate's extensions. A process is both a server and a client."""
    alternatives = ",".join(map(_alternative, names))
    usage = "keyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth,clientAuth\n"
    return f"basicConstraints=critical,CA:FALSE\n{usage}subjectAltName={alternatives}\n"


def _alternative(name: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        if not _HOST.fullmatch(name):
            raise ConfigError(f"--host: {name!r} must be a host's name or address, without a port") from None
        return f"DNS:{name}"


def _openssl(*arguments: str | Path) -> None:
    """Run openssl, which creates key files readable by their owner only. Raises ConfigError."""
    command = ["openssl", *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=OPENSSL_S, check=False)
    except FileNotFoundError:
        raise ConfigError("openssl: not found here; install it, or bring certificates of your own") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"openssl {arguments[0]}: not done within {OPENSSL_S:g} s") from None
    if done.returncode:
        raise ConfigError(f"openssl {arguments[0]}: {done.stderr.strip()[-500:]}")
