"""A compiled estimate of a step's seconds, and annealing on it.

The recurrence follows what the machines do under the simulator: each peer runs in the order of 1F1B with its depth,
links are FIFO, the exchange has links of its own, and a commit costs a round trip. Pipelines are timed one by one, so a
swap of two devices costs two of them. The estimate differs from the simulator in the exchange, whose slices it does not
follow, and at lines that devices of a host share: there it only adds up the bytes, which take at least their time.

S stages, P pipelines, N devices, K kinds of devices, H hosts with a line."""

from typing import NamedTuple

import numpy as np

from planner.cost.compiled import below, compiled, copy_row, copy_rows, unit

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
def new_timeline(n_stages, n_pipelines):
    return Timeline(
        np.empty((n_pipelines, n_stages)),
        np.empty(n_pipelines),
        np.empty((n_stages, n_pipelines)),
        np.empty(n_stages),
    )


@compiled
def pipeline_s(data, path, home, share, done):
    """Run the devices path [S] of one pipeline with `share` microbatches from the moment of the last commit, which the
    coordinator at device `home` announces. done [S] receives when each stage's last backward ends. Returns the largest
    of them."""
    S = path.shape[0]
    n_f, n_b = np.zeros(S, np.int64), np.zeros(S, np.int64)
    free = np.zeros(S)
    link_free_f, link_free_b = np.zeros(S), np.zeros(S)
    arrival_f, arrival_b = np.empty((S, share)), np.empty((S, share))
    for s in range(S):
        free[s] = data.work_s[data.kind_of[path[s]], s, UPDATE]
        if data.exchanges_per_step >= 1.0:  # else no step waits for the coordinator
            free[s] += data.latency_s[home, path[s]]
    n_left = 2 * S * share
    while n_left > 0:
        for s in range(S):
            d = path[s]
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
                        link_free_f[s] = max(link_free_f[s], free[s]) + data.boundary_s[d, path[s + 1]]
                        arrival_f[s + 1, m] = link_free_f[s] + data.latency_s[d, path[s + 1]]
                    n_f[s] += 1
                elif n_b[s] < share:
                    m = n_b[s]
                    if s + 1 < S and n_b[s + 1] <= m:
                        break
                    start = free[s] if s + 1 == S else max(free[s], arrival_b[s, m])
                    free[s] = start + data.work_s[kind, s, BACKWARD]
                    if s > 0:
                        link_free_b[s] = max(link_free_b[s], free[s]) + data.boundary_s[d, path[s - 1]]
                        arrival_b[s - 1, m] = link_free_b[s] + data.latency_s[d, path[s - 1]]
                    n_b[s] += 1
                else:
                    break
                n_left -= 1
    copy_row(free, done)
    return max(0.0, free.max())


@compiled
def _time_pipeline(data, place, home, p, timeline):
    """Time pipeline p of place [S, P], and write its part of the timeline."""
    path = np.ascontiguousarray(place[:, p])
    timeline.longest[p] = pipeline_s(data, path, home, data.shares[p], timeline.done[p])


@compiled
def _shard_bytes(data, s, t, n_pipelines):
    """Bytes of the shard that a peer of stage s and one of stage t exchange; 0 if their stages share no parameters."""
    S = data.gradient_bytes.shape[0]
    outer = (s == 0 or s == S - 1) and (t == 0 or t == S - 1)
    own = data.gradient_bytes[s] / n_pipelines if t == s else 0.0
    tied = data.tied_bytes / (2 * n_pipelines) if outer else 0.0
    return own + tied


@compiled
def exchange_s(data, place, timeline):
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
def _boundary_lines_s(data, place):
    """Seconds [H] for which boundary tensors of a step keep the line of each host busy, in its busier direction."""
    S, P = place.shape
    out_busy_s, in_busy_s = np.zeros(data.out_s.shape[0]), np.zeros(data.out_s.shape[0])
    for p in range(P):
        n_bytes = data.shares[p] * data.boundary_bytes
        for s in range(S - 1):
            _add_transfer(data, place[s, p], place[s + 1, p], n_bytes, out_busy_s, in_busy_s)
            _add_transfer(data, place[s + 1, p], place[s, p], n_bytes, out_busy_s, in_busy_s)
    return np.maximum(out_busy_s, in_busy_s)


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
    return np.maximum(out_busy_s, in_busy_s)


@compiled
def _wait_for_lines(data, place, timeline):
    """Add to timeline.averaged what the lines of hosts need for the exchange. Returns its largest entry."""
    S, P = place.shape
    busy_s = _exchange_lines_s(data, place)
    begin_s = np.full(busy_s.shape[0], np.inf)
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
def close_step(data, place, home, timeline):
    """(step's seconds, what annealing minimises) once timeline.done and timeline.longest are known. Seconds are the
    mean over steps with an exchange and local steps, which end when all peers have gathered."""
    S, P = place.shape
    has_lines = data.out_s.shape[0] > 0
    busy_s = _boundary_lines_s(data, place) if has_lines else np.zeros(0)
    for s in range(S):
        for p in range(P):
            gather_s = data.work_s[data.kind_of[place[s, p]], s, GATHER]
            done_s = timeline.done[p, s]
            host = data.host_of[place[s, p]]
            if host >= 0:
                done_s = max(done_s, busy_s[host])
            timeline.gathered[s, p] = done_s + gather_s
    local = timeline.gathered.max()
    step = exchange_s(data, place, timeline)
    if has_lines:
        step = _wait_for_lines(data, place, timeline)
    for s in range(S):
        for p in range(P):
            step = max(step, timeline.averaged[s] + data.latency_s[place[s, p], home])
    if data.exchanges_per_step < 1.0:
        for s in range(S):
            timeline.averaged[s] = local + data.exchanges_per_step * (timeline.averaged[s] - local)
        step = local + data.exchanges_per_step * (step - local)
    return step, step + MEANS_WEIGHT * (timeline.longest.mean() + timeline.averaged.mean())


@compiled
def estimate(data, place):
    """Seconds of a step of place [S, P]."""
    S, P = place.shape
    timeline = new_timeline(S, P)
    home = place.min()  # the coordinator sits beside the first peer
    for p in range(P):
        _time_pipeline(data, place, home, p, timeline)
    return close_step(data, place, home, timeline)[0]


@compiled
def balance(data, place):
    """Move microbatches from the pipeline that ends last to the one that would still end first with one more; changes
    data.shares."""
    S, P = place.shape
    shares = data.shares
    done = np.empty(S)
    end = np.empty(P)
    end_with_one_more = np.empty(P)
    home = place.min()
    for p in range(P):
        path = np.ascontiguousarray(place[:, p])
        end[p] = pipeline_s(data, path, home, shares[p], done)
        end_with_one_more[p] = pipeline_s(data, path, home, shares[p] + 1, done)
    for _ in range(shares.sum()):
        last = np.argmax(end)
        first = np.argmin(end_with_one_more)
        if last == first or shares[last] == 1 or end_with_one_more[first] >= end[last]:
            break
        shares[last] -= 1
        shares[first] += 1
        for p in (last, first):
            path = np.ascontiguousarray(place[:, p])
            end[p] = pipeline_s(data, path, home, shares[p], done)
            end_with_one_more[p] = pipeline_s(data, path, home, shares[p] + 1, done)


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


class Placement(NamedTuple):
    """place [S, P], and the devices that are left out."""

    place: np.ndarray
    spare: np.ndarray


@compiled
def _may_hold(memory, device, stage):
    return memory.need[stage] <= memory.room[device]


@compiled
def _copy(source, target):
    copy_rows(source.place, target.place)
    copy_row(source.spare, target.spare)


@compiled
def _swap(placement, i, p, other):
    """Exchange the device of stage i and pipeline p with device `other`, an index into all places and then all spare
    devices. A second call undoes it."""
    S, P = placement.place.shape
    old = placement.place[i, p]
    if other >= S * P:
        placement.place[i, p] = placement.spare[other - S * P]
        placement.spare[other - S * P] = old
    else:
        placement.place[i, p] = placement.place[other // P, other % P]
        placement.place[other // P, other % P] = old


@compiled
def _allowed(placement, memory, i, p, other):
    """Whether a swap changes anything, and both stages fit into the memory of their new devices."""
    S, P = placement.place.shape
    if other >= S * P:
        new = placement.spare[other - S * P]
        return new != placement.place[i, p] and _may_hold(memory, new, i)
    old = placement.place[i, p]
    new = placement.place[other // P, other % P]
    return old != new and _may_hold(memory, new, i) and _may_hold(memory, old, other // P)


@compiled
def _affordable(prices, placement, i, p, other):
    """Whether the devices used are within the budget after a swap."""
    S, P = placement.place.shape
    if other < S * P or prices.most_per_s == np.inf:
        return True
    change = prices.per_s[placement.spare[other - S * P]] - prices.per_s[placement.place[i, p]]
    return change <= 0 or _paid_per_s(prices, placement.place) + change <= prices.most_per_s


@compiled
def anneal_step(data, memory, prices, placement, best, rng, heat):
    """Anneal placement.place by swaps of two devices, placed or spare. `best` receives the best placement met and the
    devices that it leaves out."""
    S, P = placement.place.shape
    timeline = new_timeline(S, P)
    saved_done = np.empty((2, S))
    saved_longest = np.empty(2)
    home = placement.place.min()  # stays where it is while devices move: the caller estimates the result again
    for p in range(P):
        _time_pipeline(data, placement.place, home, p, timeline)
    step, smoothed = close_step(data, placement.place, home, timeline)
    cost = _objective(data, prices, placement.place, smoothed)
    best_objective = _objective(data, prices, placement.place, step)
    _copy(placement, best)
    hot = heat.hot * best_objective
    for k in range(heat.n_moves):
        temperature = hot * (1.0 - k / heat.n_moves) + 1e-9
        i = below(rng, S)
        p = below(rng, P)
        other = below(rng, S * P + placement.spare.shape[0])
        if not _allowed(placement, memory, i, p, other) or not _affordable(prices, placement, i, p, other):
            continue
        q = p if other >= S * P else other % P
        for slot, pipeline in enumerate((p, q)):
            copy_row(timeline.done[pipeline], saved_done[slot])
            saved_longest[slot] = timeline.longest[pipeline]
        _swap(placement, i, p, other)
        _time_pipeline(data, placement.place, home, p, timeline)
        if q != p:
            _time_pipeline(data, placement.place, home, q, timeline)
        step, smoothed = close_step(data, placement.place, home, timeline)
        new_cost = _objective(data, prices, placement.place, smoothed)
        if new_cost <= cost - temperature * np.log(1.0 - unit(rng)):
            cost = new_cost
            new_objective = _objective(data, prices, placement.place, step)
            if new_objective < best_objective:
                best_objective = new_objective
                _copy(placement, best)
            continue
        for slot, pipeline in enumerate((p, q)):
            copy_row(saved_done[slot], timeline.done[pipeline])
            timeline.longest[pipeline] = saved_longest[slot]
        _swap(placement, i, p, other)
