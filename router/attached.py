"""An attempt that another router began, and this one takes over: the decode worker goes on with it all the while."""

from __future__ import annotations

from baton.core import Role
from baton.rpc import convert
from baton.rpc.v1 import worker_pb2 as pb
from router.attempt import Attempt
from router.link import Item


class Attached(Attempt):
    """Reserving is attaching, and there is no prompt to compute. Its claim has no prefill worker."""

    @property
    def workers(self) -> tuple[str, str]:
        """No prefill worker, and D."""
        return "", self._claim.decode.info.ref.worker_id

    async def reserve(self, deadline_s: float) -> bool:
        """Ask D for what comes after the known tokens; False: it has nothing of the kind. Raises what ended it."""
        self.alone = True
        self._claim.decode.send(attach=pb.Attach(handoff=self._name, spec=convert.spec_to_pb(self.spec)))
        return await self._granted()

    def prefill(self, deadline_s: float) -> None:
        """Long done."""
        self._stages.handed_over(0.0)

    def _take(self, source: Role, item: Item) -> None:
        if isinstance(item, pb.WorkerEvent) and item.HasField("attached"):
            self.cached_tokens, self._decoding = len(self.spec), True
            self._claim.prefill_done()
        elif isinstance(item, pb.WorkerEvent) and item.HasField("refused"):
            self.handed_back, self._through = "not_there", True
        else:
            super()._take(source, item)
