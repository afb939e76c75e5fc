"""What load looks like: when requests arrive, how long they are, and which beginnings they share. Loads no server.

lengths  how many tokens: `fixed:128`, `uniform:16-512`, `lognormal:1024,1.5,8192`, `zipf:1.2,4096`, `file:PATH`
times    when: `poisson`, `constant`, `gamma:2`, at a rate
traces   both, from a file: Mooncake's, Azure's, or JSON lines of our own
source   one endless stream of `Arrival` made of these
prompts  the tokens of an arrival; equal beginnings of a trace are equal tokens
"""

from baton.workload.arrival import Arrival as Arrival
from baton.workload.arrival import Summary as Summary
from baton.workload.arrival import summary as summary
from baton.workload.lengths import Lengths as Lengths
from baton.workload.prompts import Prompts as Prompts
from baton.workload.source import arrivals as arrivals
from baton.workload.times import Times as Times
from baton.workload.traces import Trace as Trace
from baton.workload.traces import read_trace as read_trace
