"""What each method of each listener asks of its caller. A method that is not here is refused."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from baton.errors import PermissionDenied
from router.access.tokens import Grant, Right


class Need(enum.Enum):
    """What a caller must show, where tokens are configured."""

    NOTHING = "nothing"
    TOKEN = "any token"
    ADMIN = "an admin's token"
    NOBODY = "what nobody has"


_REFLECTION = "ServerReflection/ServerReflectionInfo"
RULES: Mapping[str, Need] = {
    "/baton.v1.Inference/Generate": Need.TOKEN,
    "/baton.v1.Inference/Resume": Need.TOKEN,
    "/baton.v1.Inference/Cancel": Need.TOKEN,  # of what the same tenant has started
    "/baton.v1.Inference/Tokenize": Need.TOKEN,
    "/baton.v1.Inference/Detokenize": Need.TOKEN,
    "/baton.v1.Inference/ListModels": Need.TOKEN,
    "/baton.v1.Admin/Status": Need.ADMIN,
    "/baton.v1.Admin/Requests": Need.ADMIN,
    "/baton.v1.Admin/Scale": Need.ADMIN,
    "/baton.v1.Admin/Drain": Need.ADMIN,
    "/baton.v1.Admin/Restart": Need.ADMIN,
    "/baton.v1.Admin/Watch": Need.ADMIN,
    "/baton.v1.Admin/Trace": Need.ADMIN,
    "/grpc.health.v1.Health/Check": Need.NOTHING,  # load balancers have no token
    "/grpc.health.v1.Health/Watch": Need.NOTHING,
    "/grpc.health.v1.Health/List": Need.NOBODY,  # the library has no such method yet, and logs a traceback
    f"/grpc.reflection.v1alpha.{_REFLECTION}": Need.TOKEN,
}


def check(method: str, grant: Grant) -> None:
    """Raises PermissionDenied if the owner of `grant` may not call `method`."""
    need = RULES.get(method, Need.NOBODY)
    if need is Need.NOBODY:
        raise PermissionDenied(f"{method}: nobody may call this")
    if need is Need.ADMIN and grant.right is not Right.ADMIN:
        raise PermissionDenied(f"{method}: needs an admin's token")
