"""A cluster that only writes histories: every kind of request, as its processes would record it."""

from contextlib import contextmanager
from pathlib import Path

from baton.core import HandoffId
from baton.engine.block_pool import Allocation, BlockPool
from baton.event_journal import History
from baton.testing import FakeClock


class TickingClock(FakeClock):
    """A clock for all processes. Each reading advances it a little."""

    def monotonic(self):
        self.advance(0.01)
        return super().monotonic()


def taken(pool, own, shared=()) -> Allocation:
    allocation = pool.allocate(own, shared=shared)
    assert allocation is not None
    return allocation


class Process:
    """One process with its history and, for a worker, its blocks."""

    def __init__(self, cluster, name, role, life=""):
        self.ref = f"{name}@{life}"
        self.history = History.open(str(cluster.folder), cluster.clock, role, name, life)
        self.note = self.history.note
        self.pool = BlockPool(12)
        self.held = {}
        if role != "router":
            self.note("registered")

    def reserve(self, handoff, blocks, digests=(), event="reserved"):
        """Take blocks. Return the number of shared ones."""
        shared = self.pool.find(digests)
        self.held[handoff] = taken(self.pool, blocks - len(shared), shared)
        self.history.blocks(event, handoff, self.held[handoff], shared=len(shared))
        return len(shared)

    def compute(self, handoff, blocks, digests=()):
        """Compute the prompt at a prefill worker, and cache its full blocks."""
        self.publish(handoff, self.reserve(handoff, blocks, digests, "owned"), digests)

    def publish(self, handoff, first, digests):
        if digests[first:]:
            self.held[handoff].publish(first, digests[first:])
            self.history.blocks("published", handoff, self.held[handoff], first, len(digests))

    def grow(self, handoff):
        allocation = self.held[handoff]
        before = len(allocation)
        assert allocation.grow(1)
        self.history.blocks("owned", handoff, allocation, before)

    def let_go(self, handoff, then=""):
        """Free the blocks, then note `then`."""
        allocation = self.held.pop(handoff)
        self.history.blocks("let_go", handoff, allocation)
        allocation.release()
        if then:
            self.note(then, handoff)


class Cluster:
    """Two workers of each role and a router. Each kind of request is a method; `run` has their order."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.clock = TickingClock()
        self.router = Process(self, "router-a", "router")
        self.p = Process(self, "prefill-0", "prefill", "7.1")
        self.d = Process(self, "decode-0", "decode", "7.2")
        self.other = Process(self, "decode-1", "decode", "7.3")

    def run(self):
        self.plain("plain")
        self.plain("shares")
        self.preempted("preempted")
        self.prefill_lost("fenced")
        self.decode_killed("repushed")
        self.cancelled("cancelled")
        self.fetches("fetched")
        with self.request("refused", "refused"):
            pass
        self.clock.advance(10)
        for process in (self.router, self.p, self.d, self.other):
            process.note("beat")
            process.history.close()

    # --- steps of a request --------------------------------------------------------------------------------------

    @contextmanager
    def request(self, name, outcome="finished", count=0):
        attempts: list[HandoffId] = []
        self.router.note("arrived", HandoffId(name, 0))
        yield attempts
        self.router.note("ended", HandoffId(name, len(attempts)), outcome=outcome, count=count)

    def begin(self, attempts, name, decode):
        handoff = HandoffId(name, len(attempts) + 1)
        attempts.append(handoff)
        self.router.note("attempt", handoff, prefill=self.p.ref, decode=decode.ref)
        return handoff

    def to_first_token(self, attempts, name, decode, blocks=2, digests=()):
        """Note the first attempt, which is the same for all requests."""
        handoff = self.begin(attempts, name, decode)
        decode.reserve(handoff, blocks, digests)
        self.router.note("accepted", handoff)
        self.p.note("prefill", handoff)
        self.p.compute(handoff, blocks, digests)
        self.first_token(handoff)
        return handoff

    def first_token(self, handoff, index=0, *, new=True):
        self.p.note("tokens", handoff, first=index, count=1)
        if new:
            self.router.note("delivered", handoff, first=index, count=1)

    def commit(self, handoff, decode, index=0):
        decode.note("offered", handoff)
        decode.note("committed", handoff)
        decode.note("adopted", handoff, first=index, count=1)
        self.p.let_go(handoff, "pushed")

    def decode(self, handoff, decode, first, count):
        decode.note("tokens", handoff, first=first, count=count)
        self.router.note("delivered", handoff, first=first, count=count)

    # --- requests ------------------------------------------------------------------------------------------------

    def plain(self, name):
        """P and D cache two full blocks each, and D grows by one. The next request shares them."""
        digests = [bytes([n]) * 32 for n in range(2)]
        with self.request(name, count=4) as attempts:
            handoff = self.to_first_token(attempts, name, self.d, 3, digests)
            already = self.d.pool.find(digests)
            self.commit(handoff, self.d)
            self.d.publish(handoff, len(already), digests)
            self.decode(handoff, self.d, 1, 2)
            self.d.grow(handoff)
            self.d.let_go(handoff)
            self.decode(handoff, self.d, 3, 1)
            self.d.note("finished", handoff)

    def preempted(self, name):
        with self.request(name, count=3) as attempts:
            handoff = self.to_first_token(attempts, name, self.d)
            self.commit(handoff, self.d)
            self.d.let_go(handoff, "preempted")
            self.router.note("recovered", handoff, reason="preempted")
            self._again(attempts, name)

    def _again(self, attempts, name):
        """Note the next attempt, which continues at token 1."""
        handoff = self.begin(attempts, name, self.d)
        self.d.reserve(handoff, 2)
        self.p.note("prefill", handoff)
        self.p.compute(handoff, 2)
        self.first_token(handoff, 1)
        self.commit(handoff, self.d, 1)
        self.d.let_go(handoff)
        self.decode(handoff, self.d, 2, 1)
        self.d.note("finished", handoff)

    def prefill_lost(self, name):
        """The push fails: D is fenced, and P's KV is released."""
        with self.request(name, count=3) as attempts:
            handoff = self.to_first_token(attempts, name, self.d)
            self.d.note("offered", handoff)
            self.p.note("failed", handoff, error="ChannelBroken", held=True)
            self._fence(handoff)
            self.router.note("recovered", handoff, reason="prefill_lost")
            self.p.let_go(handoff, "aborted")
            self._again(attempts, name)

    def decode_killed(self, name):
        """The other decode worker dies with a reservation. Its successor gets the KV that P still holds."""
        with self.request(name, count=2) as attempts:
            first = self.to_first_token(attempts, name, self.other)
            self.other = Process(self, "decode-1", "decode", "7.4")
            self.router.note("recovered", first, reason="decode_lost")
            second = self.begin(attempts, name, self.other)
            self.other.reserve(second, 2)
            self.p.note("repush", second, held=first.attempt)
            self.p.held[second] = self.p.held.pop(first)
            self.first_token(second, new=False)
            self.commit(second, self.other)
            self.other.let_go(second)
            self.decode(second, self.other, 1, 1)
            self.other.note("finished", second)

    def _fence(self, handoff):
        self.d.note("fenced", handoff)
        self.d.let_go(handoff, "released")

    def cancelled(self, name):
        """Cancelled while decoding. The router notes the end before D frees the blocks."""
        with self.request(name, "cancelled", count=2) as attempts:
            handoff = self.to_first_token(attempts, name, self.d)
            self.commit(handoff, self.d)
            self.decode(handoff, self.d, 1, 1)
        self.d.let_go(handoff, "released")

    def fetches(self, name):
        """D pins its blocks of a prompt, P fetches them before it computes the rest, then the client leaves."""
        digests = [bytes([99]) * 32]
        self._fill(digests)
        with self.request(name, "cancelled") as attempts:
            handoff = self.begin(attempts, name, self.d)
            self.d.reserve(handoff, 2, digests)
            self.router.note("accepted", handoff)
            self.p.note("prefill", handoff)
            fetch = taken(self.p.pool, 1)
            pin = taken(self.d.pool, 0, self.d.pool.find(digests))
            self.p.history.blocks("owned", handoff, fetch, part="fetch")
            self.d.history.blocks("owned", handoff, pin, shared=1, part="pin")
            self.d.note("offered", handoff)
            fetch.publish(0, digests)
            self.p.history.blocks("published", handoff, fetch, part="fetch")
            self.p.history.blocks("let_go", handoff, fetch, part="fetch")
            fetch.release()
            self.d.history.blocks("let_go", handoff, pin, part="pin")
            pin.release()
            self.p.compute(handoff, 2, digests)
        self.p.let_go(handoff, "aborted")
        self._fence(handoff)

    def _fill(self, digests):
        """Leave a block of an earlier turn at D, which P never had."""
        with self.request("earlier", count=1) as attempts:
            handoff = self.to_first_token(attempts, "earlier", self.d)
            self.commit(handoff, self.d)
            self.d.publish(handoff, 0, digests)
            self.d.let_go(handoff, "finished")
