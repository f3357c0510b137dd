"""A compiled estimate of a step's seconds, and annealing on it.

The recurrence follows what the machines do under the simulator: each peer runs in the order of 1F1B with its depth,
links are FIFO, the exchange has links of its own, and a commit costs a round trip. Pipelines are timed one by one, so a
swap of two devices costs two of them. The estimate differs from the simulator in the exchange, whose slices it does not
follow, and at lines that devices of a host share: there it only adds up the bytes, which take at least their time.

S stages, P pipelines, N devices, K kinds of devices, H hosts with a line."""

from typing import NamedTuple

import numpy as np

from planner.cost.compiled import below, compiled, copy_row, copy_rows, unit
from planner.search.charges import SeatScratch, charge

MEANS_WEIGHT = 0.1  # of the means in what annealing minimises: maxima alone hide progress
FORWARD, BACKWARD, GATHER, UPDATE = range(4)


class StepData(NamedTuple):
    """All that a step's seconds depend on besides the placement.

    kind_of [N]; work_s [K, S, 4] seconds of forward, backward, gather and update; latency_s [N, N] of a link,
    boundary_s [N, N] for which one tensor keeps it busy, s_per_byte [N, N]. gradient_bytes [S] are what replicas of a
    stage exchange, tied_bytes what the first and the last stage exchange besides. shares [P] are microbatches of a
    pipeline, depth [S] the forwards in flight. exchanges_per_step: 1, or fewer where replicas do local steps between
    two averages. boundary_bytes of one tensor; host_of [N] the host among those with a
    line, or -1; out_s, in_s [H] seconds a byte out of a host and into it."""

    kind_of: np.ndarray
    work_s: np.ndarray
    latency_s: np.ndarray
    boundary_s: np.ndarray
    s_per_byte: np.ndarray
    gradient_bytes: np.ndarray
    tied_bytes: float
    slice_bytes: float
    exchanges_per_step: float
    shares: np.ndarray
    depth: np.ndarray
    boundary_bytes: float
    host_of: np.ndarray
    out_s: np.ndarray
    in_s: np.ndarray


class Timeline(NamedTuple):
    """Instants of a step, in seconds since the last commit: done [P, S] when a stage's last backward ends and longest
    [P] the largest of a pipeline's; gathered [S, P] when a peer offers its gradient; averaged [S] when a stage's last
    member holds the result."""

    done: np.ndarray
    longest: np.ndarray
    gathered: np.ndarray
    averaged: np.ndarray


@compiled
def _new_timeline(n_stages, n_pipelines):
    return Timeline(
        np.empty((n_pipelines, n_stages)),
        np.empty(n_pipelines),
        np.empty((n_stages, n_pipelines)),
        np.empty(n_stages),
    )


@compiled
def _first_device(place):
    """The least index in place [S, P]: the coordinator sits beside the first peer."""
    first = place[0, 0]
    for s in range(place.shape[0]):
        for p in range(place.shape[1]):
            first = min(first, place[s, p])
    return first


@compiled
def _pipeline_s(data, place, p, home, share, done):
    """Run pipeline p of place [S, P] with `share` microbatches from the moment of the last commit, which the
    coordinator at device `home` announces. done [S] receives when each stage's last backward ends. Returns the largest
    of them."""
    S = place.shape[0]
    n_f, n_b = np.zeros(S, np.int64), np.zeros(S, np.int64)
    free = np.zeros(S)
    link_free_f, link_free_b = np.zeros(S), np.zeros(S)
    arrival_f, arrival_b = np.empty((S, share)), np.empty((S, share))
    for s in range(S):
        d = place[s, p]
        free[s] = data.work_s[data.kind_of[d], s, UPDATE]
        if data.exchanges_per_step >= 1.0:  # else no step waits for the coordinator
            free[s] += data.latency_s[home, d]
    n_left = 2 * S * share
    while n_left > 0:
        for s in range(S):
            d = place[s, p]
            kind = data.kind_of[d]
            warm_up = min(data.depth[s], share)
            while True:
                if n_f[s] < share and n_f[s] - n_b[s] < warm_up:
                    m = n_f[s]
                    if s > 0 and n_f[s - 1] <= m:
                        break
                    start = free[s] if s == 0 else max(free[s], arrival_f[s, m])
                    free[s] = start + data.work_s[kind, s, FORWARD]
                    if s + 1 < S:
                        link_free_f[s] = max(link_free_f[s], free[s]) + data.boundary_s[d, place[s + 1, p]]
                        arrival_f[s + 1, m] = link_free_f[s] + data.latency_s[d, place[s + 1, p]]
                    n_f[s] += 1
                elif n_b[s] < share:
                    m = n_b[s]
                    if s + 1 < S and n_b[s + 1] <= m:
                        break
                    start = free[s] if s + 1 == S else max(free[s], arrival_b[s, m])
                    free[s] = start + data.work_s[kind, s, BACKWARD]
                    if s > 0:
                        link_free_b[s] = max(link_free_b[s], free[s]) + data.boundary_s[d, place[s - 1, p]]
                        arrival_b[s - 1, m] = link_free_b[s] + data.latency_s[d, place[s - 1, p]]
                    n_b[s] += 1
                else:
                    break
                n_left -= 1
    copy_row(free, done)
    longest = 0.0
    for s in range(S):
        longest = max(longest, free[s])
    return longest


@compiled
def _time_pipeline(data, place, home, p, timeline):
    """Time pipeline p of place [S, P], and write its part of the timeline."""
    timeline.longest[p] = _pipeline_s(data, place, p, home, data.shares[p], timeline.done[p])


@compiled
def _shard_bytes(data, s, t, n_pipelines):
    """Bytes of the shard that a peer of stage s and one of stage t exchange; 0 if their stages share no parameters."""
    S = data.gradient_bytes.shape[0]
    outer = (s == 0 or s == S - 1) and (t == 0 or t == S - 1)
    own = data.gradient_bytes[s] / n_pipelines if t == s else 0.0
    tied = data.tied_bytes / (2 * n_pipelines) if outer else 0.0
    return own + tied


@compiled
def _exchange_s(data, place, timeline):
    """Averaging among replicas, and of a tied token table among the first and last stage. Fills timeline.averaged from
    timeline.gathered, and returns its largest entry. A link is busy with the sender's shards and then with its sums,
    the last slice of which leaves when every member's slice has arrived."""
    S, P = place.shape
    gathered = timeline.gathered
    summed = np.empty((S, P))
    for s in range(S):
        for o in range(P):
            late = gathered[s, o]
            for t in range(S):
                n_bytes = _shard_bytes(data, s, t, P)
                if t == s or n_bytes > 0:
                    for m in range(P):
                        if t != s or m != o:
                            src, dst = place[t, m], place[s, o]
                            arrival = gathered[t, m] + n_bytes * data.s_per_byte[src, dst] + data.latency_s[src, dst]
                            late = max(late, arrival)
            summed[s, o] = late
    worst = 0.0
    for s in range(S):
        timeline.averaged[s] = 0.0
        for m in range(P):
            timeline.averaged[s] = max(timeline.averaged[s], summed[s, m])
            for t in range(S):
                n_bytes = _shard_bytes(data, s, t, P)
                if t == s or n_bytes > 0:
                    for o in range(P):
                        if t != s or o != m:
                            src, dst = place[t, o], place[s, m]
                            last = summed[t, o] + min(n_bytes, data.slice_bytes) * data.s_per_byte[src, dst]
                            sent = max(gathered[t, o] + 2 * n_bytes * data.s_per_byte[src, dst], last)
                            timeline.averaged[s] = max(timeline.averaged[s], sent + data.latency_s[src, dst])
        worst = max(worst, timeline.averaged[s])
    return worst


@compiled
def _add_transfer(data, src, dst, n_bytes, out_busy_s, in_busy_s):
    """Count the time of a transfer at the lines of its two hosts."""
    src_host = data.host_of[src]
    dst_host = data.host_of[dst]
    if src_host == dst_host:
        return  # inside a host, or between two without a line
    if src_host >= 0:
        out_busy_s[src_host] += n_bytes * data.out_s[src_host]
    if dst_host >= 0:
        in_busy_s[dst_host] += n_bytes * data.in_s[dst_host]


@compiled
def _busier_s(out_busy_s, in_busy_s):
    """out_busy_s [H], with the seconds of the other direction where those are more."""
    for host in range(out_busy_s.shape[0]):
        out_busy_s[host] = max(out_busy_s[host], in_busy_s[host])
    return out_busy_s


@compiled
def _boundary_lines_s(data, place):
    """Seconds [H] for which boundary tensors of a step keep the line of each host busy, in its busier direction."""
    S, P = place.shape
    out_busy_s, in_busy_s = np.zeros(data.out_s.shape[0]), np.zeros(data.out_s.shape[0])
    for p in range(P):
        n_bytes = data.shares[p] * data.boundary_bytes
        for s in range(S - 1):
            _add_transfer(data, place[s, p], place[s + 1, p], n_bytes, out_busy_s, in_busy_s)
            _add_transfer(data, place[s + 1, p], place[s, p], n_bytes, out_busy_s, in_busy_s)
    return _busier_s(out_busy_s, in_busy_s)


@compiled
def _exchange_lines_s(data, place):
    """Seconds [H] for which the shards and sums of the exchange keep the line of each host busy, in the same way."""
    S, P = place.shape
    out_busy_s, in_busy_s = np.zeros(data.out_s.shape[0]), np.zeros(data.out_s.shape[0])
    for s in range(S):
        for t in range(S):
            n_bytes = 2 * _shard_bytes(data, s, t, P)
            if n_bytes > 0:
                for o in range(P):
                    for m in range(P):
                        if t != s or m != o:
                            _add_transfer(data, place[t, m], place[s, o], n_bytes, out_busy_s, in_busy_s)
    return _busier_s(out_busy_s, in_busy_s)


@compiled
def _wait_for_lines(data, place, timeline):
    """Add to timeline.averaged what the lines of hosts need for the exchange. Returns its largest entry."""
    S, P = place.shape
    busy_s = _exchange_lines_s(data, place)
    begin_s = np.empty(busy_s.shape[0])
    for host in range(busy_s.shape[0]):
        begin_s[host] = np.inf
    for s in range(S):
        for p in range(P):
            host = data.host_of[place[s, p]]
            if host >= 0:
                begin_s[host] = min(begin_s[host], timeline.gathered[s, p])
    worst = 0.0
    for s in range(S):
        for p in range(P):
            host = data.host_of[place[s, p]]
            if host >= 0:
                timeline.averaged[s] = max(timeline.averaged[s], begin_s[host] + busy_s[host])
        worst = max(worst, timeline.averaged[s])
    return worst


@compiled
def _close_step(data, place, home, timeline):
    """(step's seconds, what annealing minimises) once timeline.done and timeline.longest are known. Seconds are the
    mean over steps with an exchange and local steps, which end when all peers have gathered."""
    S, P = place.shape
    has_lines = data.out_s.shape[0] > 0
    busy_s = _boundary_lines_s(data, place) if has_lines else np.zeros(0)
    local = 0.0
    for s in range(S):
        for p in range(P):
            gather_s = data.work_s[data.kind_of[place[s, p]], s, GATHER]
            done_s = timeline.done[p, s]
            host = data.host_of[place[s, p]]
            if host >= 0:
                done_s = max(done_s, busy_s[host])
            timeline.gathered[s, p] = done_s + gather_s
            local = max(local, timeline.gathered[s, p])
    step = _exchange_s(data, place, timeline)
    if has_lines:
        step = _wait_for_lines(data, place, timeline)
    for s in range(S):
        for p in range(P):
            step = max(step, timeline.averaged[s] + data.latency_s[place[s, p], home])
    if data.exchanges_per_step < 1.0:
        for s in range(S):
            timeline.averaged[s] = local + data.exchanges_per_step * (timeline.averaged[s] - local)
        step = local + data.exchanges_per_step * (step - local)
    longest = 0.0
    for p in range(P):
        longest += timeline.longest[p]
    averaged = 0.0
    for s in range(S):
        averaged += timeline.averaged[s]
    return step, step + MEANS_WEIGHT * (longest / P + averaged / S)


@compiled
def estimate(data, place):
    """Seconds of a step of place [S, P]."""
    S, P = place.shape
    timeline = _new_timeline(S, P)
    home = _first_device(place)
    for p in range(P):
        _time_pipeline(data, place, home, p, timeline)
    return _close_step(data, place, home, timeline)[0]


@compiled
def _time_ends(data, place, home, p, end, end_with_one_more, done):
    """Write when pipeline p ends, and when it would with one more microbatch."""
    end[p] = _pipeline_s(data, place, p, home, data.shares[p], done)
    end_with_one_more[p] = _pipeline_s(data, place, p, home, data.shares[p] + 1, done)


@compiled
def balance(data, place):
    """Move microbatches from the pipeline that ends last to the one that would still end first with one more; changes
    data.shares."""
    S, P = place.shape
    shares = data.shares
    done, end, end_with_one_more = np.empty(S), np.empty(P), np.empty(P)
    home = _first_device(place)
    n_shares = 0
    for p in range(P):
        n_shares += shares[p]
        _time_ends(data, place, home, p, end, end_with_one_more, done)
    for _ in range(n_shares):
        last = np.int64(0)
        first = np.int64(0)
        for p in range(1, P):
            if end[p] > end[last]:
                last = p
            if end_with_one_more[p] < end_with_one_more[first]:
                first = p
        if last == first or shares[last] == 1 or end_with_one_more[first] >= end[last]:
            break
        shares[last] -= 1
        shares[first] += 1
        _time_ends(data, place, home, last, end, end_with_one_more, done)
        _time_ends(data, place, home, first, end, end_with_one_more, done)


# ---------------------------------------------------------------------------------------------------------- annealing


class Prices(NamedTuple):
    """per_s [N] of each device; per_byte [N, N] from each device to each other one. Annealing minimises the price of a
    step if `is_minimised`, else its seconds. No more than most_per_s may be paid for the devices used."""

    per_s: np.ndarray
    per_byte: np.ndarray
    is_minimised: bool
    most_per_s: float


class Heat(NamedTuple):
    """The first temperature as a part of what is minimised, and the number of moves until it is zero."""

    hot: float
    n_moves: int


@compiled
def _paid_per_s(prices, place):
    """Price of the devices used."""
    total = 0.0
    for s in range(place.shape[0]):
        for p in range(place.shape[1]):
            total += prices.per_s[place[s, p]]
    return total


@compiled
def egress(data, prices, place):
    """Price of the bytes of a step that leave their region: boundary tensors both ways, shards and sums."""
    S, P = place.shape
    total = 0.0
    for p in range(P):
        n_bytes = data.shares[p] * data.boundary_bytes
        for s in range(S - 1):
            there = prices.per_byte[place[s, p], place[s + 1, p]]
            total += n_bytes * (there + prices.per_byte[place[s + 1, p], place[s, p]])
    for s in range(S):
        for t in range(S):
            n_bytes = 2 * _shard_bytes(data, s, t, P)
            if n_bytes > 0:
                for o in range(P):
                    for m in range(P):
                        if t != s or m != o:
                            total += n_bytes * prices.per_byte[place[t, m], place[s, o]]
    return total


@compiled
def _objective(data, prices, place, seconds):
    """The value that is minimised, from the seconds of a step: the seconds themselves, or the step's price."""
    if not prices.is_minimised:
        return seconds
    return seconds * _paid_per_s(prices, place) + egress(data, prices, place)


class Memory(NamedTuple):
    """room [N] bytes of each device, need [S] bytes of each stage."""

    room: np.ndarray
    need: np.ndarray


class StepWalk(NamedTuple):
    """The arrays that annealing works on: place [S, P], the devices that are left out, the best placement met, and
    scratch."""

    place: np.ndarray
    spare: np.ndarray
    best: np.ndarray
    seat_scratch: SeatScratch


@compiled
def _swap(walk, i, p, other):
    """Exchange the device of stage i and pipeline p with device `other`, an index into all places and then all spare
    devices. A second call undoes it."""
    place, spare = walk.place, walk.spare
    S, P = place.shape
    old = place[i, p]
    if other >= S * P:
        place[i, p] = spare[other - S * P]
        spare[other - S * P] = old
    else:
        place[i, p] = place[other // P, other % P]
        place[other // P, other % P] = old


@compiled
def _allowed(walk, memory, prices, i, p, other):
    """Whether a swap changes anything, both stages fit into the memory of their new devices, and the devices used stay
    within the budget."""
    S, P = walk.place.shape
    old = walk.place[i, p]
    if other < S * P:
        new = walk.place[other // P, other % P]
        fits = memory.need[i] <= memory.room[new] and memory.need[other // P] <= memory.room[old]
        return old != new and fits
    new = walk.spare[other - S * P]
    change = prices.per_s[new] - prices.per_s[old]
    if prices.most_per_s < np.inf and change > 0 and _paid_per_s(prices, walk.place) + change > prices.most_per_s:
        return False
    return memory.need[i] <= memory.room[new]


@compiled
def anneal_step(data, memory, prices, charges, walk, rng, heat):
    """Anneal walk.place by swaps of two devices, placed or spare. walk.best receives the allowed placement with the
    least estimate, with its charges (planner.search.charges). Returns that sum; infinite if none was met."""
    place = walk.place
    S, P = place.shape
    timeline = _new_timeline(S, P)
    saved_done = np.empty((2, S))
    saved_longest = np.empty(2)
    home = _first_device(place)  # stays where it is while devices move: the caller estimates the result again
    for p in range(P):
        _time_pipeline(data, place, home, p, timeline)
    step, smoothed = _close_step(data, place, home, timeline)
    is_charged = charges.move_s.shape[0] > 0
    n_bad = 0
    move_s = 0.0
    if is_charged:
        n_bad, move_s = charge(charges, place, walk.seat_scratch)
    cost = _objective(data, prices, place, smoothed) + move_s + n_bad * charges.violation_s
    value = _objective(data, prices, place, step)
    hot = heat.hot * value
    best = value + move_s if n_bad == 0 else np.inf
    copy_rows(place, walk.best)
    for k in range(heat.n_moves):
        temperature = hot * (1.0 - k / heat.n_moves) + 1e-9
        i = below(rng, S)
        p = below(rng, P)
        other = below(rng, S * P + walk.spare.shape[0])
        if not _allowed(walk, memory, prices, i, p, other):
            continue
        allowed = cost - temperature * np.log(1.0 - unit(rng))
        q = p if other >= S * P else other % P
        _swap(walk, i, p, other)
        if is_charged:
            n_bad, move_s = charge(charges, place, walk.seat_scratch)
            if move_s + n_bad * charges.violation_s > allowed:
                _swap(walk, i, p, other)
                continue
        for slot in range(2):
            pipeline = p if slot == 0 else q
            copy_row(timeline.done[pipeline], saved_done[slot])
            saved_longest[slot] = timeline.longest[pipeline]
        for slot in range(1 if p == q else 2):
            _time_pipeline(data, place, home, p if slot == 0 else q, timeline)
        step, smoothed = _close_step(data, place, home, timeline)
        new_cost = _objective(data, prices, place, smoothed) + move_s + n_bad * charges.violation_s
        if new_cost <= allowed:
            cost = new_cost
            if n_bad == 0:
                value = _objective(data, prices, place, step) + move_s
                if value < best:
                    best = value
                    copy_rows(place, walk.best)
            continue
        for slot in range(2):
            pipeline = p if slot == 0 else q
            copy_row(saved_done[slot], timeline.done[pipeline])
            timeline.longest[pipeline] = saved_longest[slot]
        _swap(walk, i, p, other)
    return best
