"""The section `security` of the cluster file, and what all sections have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator

from baton.config.listeners import NEEDS, parse_allowed

_ALLOWED = {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"enum": list(NEEDS)}}]}


class Section(BaseModel):
    """Frozen, and closed: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class TlsConfig(Section):
    """Files of certificates and of the private key, as PEM. All processes of a cluster show the same certificate."""

    cert: str = Field(min_length=1, description="the cluster's certificate, and those between it and the CA")
    key: str = Field(min_length=1, description="its private key, not encrypted")
    ca: str = Field(min_length=1, description="who signed it; whoever else it signs for may speak to the workers")
    name: str | None = Field(
        default=None,
        min_length=1,
        description="what the cluster's processes look for in each other's certificate; null: the host that is called",
    )

    def files(self) -> dict[str, str]:
        """The path of each part."""
        return {"cert": self.cert, "key": self.key, "ca": self.ca}


class SecurityConfig(Section):
    """A listener off the loopback needs TLS and tokens, or a word that it does not."""

    tls: TlsConfig | None = Field(
        default=None, description="these files, or a folder with cert.pem, key.pem and ca.pem (see `baton certs`)"
    )
    tokens: str | None = Field(default=None, min_length=1, description="a file of tokens, read again when it changes")
    allow_insecure: Annotated[bool | tuple[str, ...], BeforeValidator(parse_allowed), WithJsonSchema(_ALLOWED)] = Field(
        default=False, description="true, or the listeners that may be open to all, such as [router.metrics]"
    )

    @field_validator("tls", mode="before", json_schema_input_type=TlsConfig | str | None)
    @classmethod
    def _of_folder(cls, tls: object) -> object:
        return {part: f"{tls}/{part}.pem" for part in ("cert", "key", "ca")} if isinstance(tls, str) and tls else tls
