"""Sampling of all rows of a step in at most four launches, whatever their parameters: `Draws`.

1. `peak_kernel`: the best logit and its lowest column, by segment of the vocabulary.
2. `edge_kernel`, if a row has filters: min-p, top-k and top-p as one threshold by row, found by a search over pivots.
3. `draw_kernel`, if a row has a temperature: scale, add Gumbel noise, and the best column, by segment.
4. `token_kernel`: the best segment.

No program reads another row, and segments depend on the vocabulary alone: so a token does not depend on the batch.
A logit x counts by its distance d = (max - x) / temperature, rounded as on a CPU. Floats that are not negative have
the order of their bits, so thresholds are int32. Noise bits are those of `noise.columns_hash`. Sums of probabilities
are float32, here only: top-p may keep one token more or less than a CPU where a sum equals `top_p` up to rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SEGMENT = 2048  # columns of one program
SEARCHED = 1024  # columns in one tile of the search
PIVOTS = tl.constexpr(16)
INFINITY = tl.constexpr(0x7F800000)  # bits of infinity in float32
EVERY = tl.constexpr(0x7FFFFFFF)


# fmt: off
@triton.jit
def is_nan(x: tl.tensor) -> tl.tensor:
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > INFINITY


@triton.jit
def mixed(x: tl.tensor) -> tl.tensor:
    """Return murmur3's finaliser of uint32."""
    x = (x ^ (x >> 16)) * tl.full([], 0x85EBCA6B, tl.uint32)
    x = (x ^ (x >> 13)) * tl.full([], 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def hashed(columns: tl.tensor, first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Return the 31 bits of `noise.columns_hash`, as int32."""
    x = columns.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32) ^ first.to(tl.uint32, bitcast=True)
    x = mixed(mixed(x) ^ second.to(tl.uint32, bitcast=True))
    return (x & tl.full([], 0x7FFFFFFF, tl.uint32)).to(tl.int32)


@triton.jit
def gumbel(bits: tl.tensor) -> tl.tensor:
    """Return -log(-log(1 - u)) of the uniform variate u that `sampler.gumbel` makes of the same bits."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    # A GPU's logarithm is exact only up to an absolute error, but small variates win: they need a series.
    series = u * (1 + u * (0.5 + u * (0.3333333333 + u * (0.25 + u * (0.2 + u * 0.1666666667)))))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1.0 - u)))


@triton.jit
def peak_of(peaks: tl.tensor, row: tl.tensor, segments: int, SEGMENTS: tl.constexpr) -> tl.tensor:
    """Return the best logit of a row, or NaN if the row has any."""
    numbers = tl.arange(0, SEGMENTS)
    found = tl.load(peaks + row * segments + numbers, mask=numbers < segments, other=float("-inf"))
    broken = tl.max(is_nan(found).to(tl.int32), axis=0)
    return tl.where(broken > 0, float("nan"), tl.max(tl.where(is_nan(found), float("-inf"), found), axis=0))


@triton.jit
def distances(
    logits: tl.tensor, columns: tl.tensor, vocab: int, peak: tl.tensor, temperature: tl.tensor
) -> tl.tensor:
    x = tl.load(logits + columns, mask=columns < vocab, other=float("-inf"))
    return tl.div_rn(peak - x, temperature)


@triton.jit
def peak_kernel(
    logits: tl.tensor, peaks: tl.tensor, places: tl.tensor, stride: int, vocab: int, segments: int, BLOCK: tl.constexpr
) -> None:
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = segment * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf"))
    broken = tl.max(is_nan(x).to(tl.int32), axis=0)
    peak = tl.max(tl.where(is_nan(x), float("-inf"), x), axis=0)
    tl.store(peaks + row * segments + segment, tl.where(broken > 0, float("nan"), peak))
    tl.store(places + row * segments + segment, tl.min(tl.where(x == peak, columns, vocab), axis=0))


@triton.jit
def measured(
    logits: tl.tensor, vocab: int, peak: tl.tensor, temperature: tl.tensor, pivots: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return how many columns are within each pivot, and the sum of their exp(-distance)."""
    counts = tl.zeros([PIVOTS, BLOCK], tl.int32)
    masses = tl.zeros([PIVOTS, BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        distance = distances(logits, columns, vocab, peak, temperature)
        within = (distance.to(tl.int32, bitcast=True)[None, :] <= pivots[:, None]) & (columns < vocab)[None, :]
        counts += within.to(tl.int32)
        masses += tl.where(within, tl.exp(-distance)[None, :], 0.0)
    return tl.sum(counts, axis=1), tl.sum(masses, axis=1)


@triton.jit
def search(
    logits: tl.tensor, vocab: int, peak: tl.tensor, temperature: tl.tensor, high: tl.tensor, wanted: tl.tensor,
    share: tl.tensor, total: tl.tensor, BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the lowest edge up to `high` within which are `wanted` columns or, if that is 0, the `share` of the mass
    `total` (0: of all within `high`). Also return the count and mass before it, the count at it, the mass up to it, and
    the mass that was wanted.

    If one column alone is at the edge, the edge may be anywhere up to the next column.
    """
    numbers = tl.arange(0, PIVOTS)
    low, goal = tl.full([], -1, tl.int32), share * total
    before, light, at, mass = tl.full([], 0, tl.int32), share * 0.0, tl.full([], EVERY, tl.int32), share * 0.0
    while (at > 1) & ((high - low > 1) | (at == EVERY)):
        pivots = (low + ((high - low).to(tl.int64) * (numbers + 1)) // PIVOTS).to(tl.int32)  # the last one is `high`
        counts, masses = measured(logits, vocab, peak, temperature, pivots, BLOCK)
        goal = tl.where((at == EVERY) & (total <= 0.0), share * tl.max(masses, axis=0), goal)
        reached = ((wanted > 0) & (counts >= wanted)) | ((wanted == 0) & (masses >= goal)) | (pivots == high)
        high = tl.min(tl.where(reached, pivots, high), axis=0)
        low = tl.maximum(low, tl.max(tl.where(reached, low, pivots), axis=0))
        before = tl.maximum(before, tl.max(tl.where(reached, 0, counts), axis=0))
        light = tl.maximum(light, tl.max(tl.where(reached, 0.0, masses), axis=0))
        at = tl.min(tl.where(reached, counts, EVERY), axis=0) - before
        mass = tl.min(tl.where(reached, masses, float("inf")), axis=0)
    return high, before, light, at, mass, goal


@triton.jit
def place_of_tie(
    logits: tl.tensor, vocab: int, peak: tl.tensor, temperature: tl.tensor, edge: tl.tensor, number: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the column of the tie with this number, from 1, among the columns at `edge`."""
    found, seen = tl.full([], EVERY, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        distance = distances(logits, columns, vocab, peak, temperature)
        ties = ((distance.to(tl.int32, bitcast=True) == edge) & (columns < vocab)).to(tl.int32)
        is_it = (ties > 0) & (seen + tl.cumsum(ties, axis=0) == number)
        found = tl.minimum(found, tl.min(tl.where(is_it, columns, EVERY), axis=0))
        seen += tl.sum(ties, axis=0)
    return found


@triton.jit
def edge_kernel(
    logits: tl.tensor, parameters: tl.tensor, peaks: tl.tensor, edges: tl.tensor, stride: int, vocab: int,
    segments: int, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    """Store the largest distance that passes the filters of one row, and the last column that passes at it."""
    row = tl.program_id(0).to(tl.int64)
    own = parameters + row * 6
    temperature, top_k = tl.load(own + 2).to(tl.float32, bitcast=True), tl.load(own + 3)
    top_p, edge = tl.load(own + 4).to(tl.float32, bitcast=True), tl.load(own + 5)
    peak = peak_of(peaks, row, segments, SEGMENTS)
    last = tl.full([], EVERY, tl.int32)
    if (temperature > 0.0) & (tl.abs(peak) < float("inf")):
        logits += row * stride
        places, at, total = last, last, top_p * 0.0
        if top_k < vocab:
            edge, before, light, at, mass, goal = search(
                logits, vocab, peak, temperature, edge, top_k, top_p, total, BLOCK
            )
            places = tl.minimum(top_k - before, at)
            weight = tl.exp(-edge.to(tl.float32, bitcast=True))
            total = tl.where(places < at, light + places.to(tl.float32) * weight, mass)
        if top_p < 1.0:
            limit, most = edge, places
            edge, before, light, at, mass, goal = search(
                logits, vocab, peak, temperature, edge, last * 0, top_p, total, BLOCK
            )
            weight = tl.exp(-edge.to(tl.float32, bitcast=True))
            needed = tl.where(weight > 0.0, tl.ceil((goal - light) / weight), 2.0e9)
            places = tl.maximum(tl.minimum(needed, at.to(tl.float32)), 1.0).to(tl.int32)
            places = tl.where(edge == limit, tl.minimum(places, most), places)
        if places < at:
            last = place_of_tie(logits, vocab, peak, temperature, edge, places, BLOCK)
    tl.store(edges + row * 2, edge)
    tl.store(edges + row * 2 + 1, last)


@triton.jit
def draw_kernel(
    logits: tl.tensor, parameters: tl.tensor, peaks: tl.tensor, edges: tl.tensor, noisy: tl.tensor, places: tl.tensor,
    stride: int, vocab: int, segments: int, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = parameters + row * 6
    temperature = tl.load(own + 2).to(tl.float32, bitcast=True)
    if temperature > 0.0:
        columns = segment * BLOCK + tl.arange(0, BLOCK)
        peak = peak_of(peaks, row, segments, SEGMENTS)
        distance = distances(logits + row * stride, columns, vocab, peak, temperature)
        value = gumbel(hashed(columns, tl.load(own), tl.load(own + 1))) - distance
        allowed = columns < vocab
        top_k, top_p = tl.load(own + 3), tl.load(own + 4).to(tl.float32, bitcast=True)
        if (top_k < vocab) | (top_p < 1.0) | (tl.load(own + 5) < INFINITY):
            edge, last = tl.load(edges + row * 2), tl.load(edges + row * 2 + 1)
            bits = distance.to(tl.int32, bitcast=True)
            allowed = allowed & ((bits < edge) | ((bits == edge) & (columns <= last)))
        value = tl.where(allowed, value, float("-inf"))
        best = tl.max(value, axis=0)
        tl.store(noisy + row * segments + segment, best)
        tl.store(places + row * segments + segment, tl.min(tl.where(value == best, columns, vocab), axis=0))


@triton.jit
def token_kernel(
    parameters: tl.tensor, peaks: tl.tensor, places: tl.tensor, noisy: tl.tensor, noisy_places: tl.tensor,
    tokens: tl.tensor, segments: int, SEGMENTS: tl.constexpr,
) -> None:
    """Store the token of one row, or -1 if its best logit is not a finite number."""
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, SEGMENTS)
    there, at = numbers < segments, row * segments + numbers
    values = tl.load(peaks + at, mask=there, other=float("-inf"))
    columns = tl.load(places + at, mask=there, other=EVERY)
    if tl.load(parameters + row * 6 + 2) > 0:  # bits of the temperature
        values = tl.load(noisy + at, mask=there, other=float("-inf"))
        columns = tl.load(noisy_places + at, mask=there, other=EVERY)
    token = tl.min(tl.where(values == tl.max(values, axis=0), columns, EVERY), axis=0)
    finite = tl.abs(peak_of(peaks, row, segments, SEGMENTS)) < float("inf")
    tl.store(tokens + row, tl.where(finite, token, -1).to(tl.int64))


def draw(scores: Tensor, parameters: Tensor, *, drawn: bool, filtered: bool) -> Tensor:
    """Return the tokens of all rows, int64 `[rows]`, on their device; -1 where none can be drawn.

    It is the `FusedDraw` of a GPU. `scores` must have contiguous rows.
    """
    rows, vocab = scores.shape
    segments = triton.cdiv(vocab, SEGMENT)
    grid, width, stride = (rows, segments), triton.next_power_of_2(segments), scores.stride(0)
    peaks, noisy = (scores.new_empty(grid) for _ in range(2))
    places, noisy_places = (parameters.new_empty(grid) for _ in range(2))
    edges = parameters.new_empty(rows, 2)
    tokens = torch.empty(rows, dtype=torch.int64, device=scores.device)
    peak_kernel[grid](scores, peaks, places, stride, vocab, segments, BLOCK=SEGMENT, num_warps=4)
    if filtered:
        edge_kernel[(rows,)](
            scores, parameters, peaks, edges, stride, vocab, segments,
            SEGMENTS=width, BLOCK=SEARCHED, num_warps=16,
        )
    if drawn:
        draw_kernel[grid](
            scores, parameters, peaks, edges, noisy, noisy_places, stride, vocab, segments,
            SEGMENTS=width, BLOCK=SEGMENT, num_warps=4,
        )
    token_kernel[(rows,)](
        parameters, peaks, places, noisy, noisy_places, tokens, segments,
        SEGMENTS=width, num_warps=1,
    )
    return tokens
# fmt: on
