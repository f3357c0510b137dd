"""Compiled estimate of a step's seconds, and annealing on it.

The recurrence follows what the machines do under the simulator: each peer in the order of 1F1B with its depth, links
FIFO, the exchange on links of its own, the commit's round trip. Pipelines are timed one by one, so a swap of two
devices costs two of them. Differences to the simulator are in the exchange only, whose slices are not followed.
"""

import numpy as np

from planner.cost.compiled import below, compiled, unit

SOFT = 0.1  # part of the means in what annealing minimises: maxima alone hide progress
FORWARD, BACKWARD, GATHER, UPDATE = range(4)


@compiled
def pipeline_s(devices, home, kind_of, work, lat, occ, share, depth, done):
    """Run one pipeline [S] with `share` microbatches from the moment of the last commit, which the coordinator at
    device `home` announces; occ [N, N] is one tensor's time on a link. done[s] receives when stage s has finished its
    last backward. Returns the largest of them."""
    S = devices.shape[0]
    n_f, n_b = np.zeros(S, np.int64), np.zeros(S, np.int64)
    free = np.zeros(S)
    line_f, line_b = np.zeros(S), np.zeros(S)
    came_f, came_b = np.empty((S, share)), np.empty((S, share))
    for s in range(S):
        free[s] = lat[home, devices[s]] + work[kind_of[devices[s]], s, UPDATE]
    left = 2 * S * share
    while left > 0:
        for s in range(S):
            d = devices[s]
            warm = min(depth[s], share)
            while True:
                if n_f[s] < share and n_f[s] - n_b[s] < warm:
                    m = n_f[s]
                    if s > 0 and n_f[s - 1] <= m:
                        break
                    start = free[s] if s == 0 else max(free[s], came_f[s, m])
                    free[s] = start + work[kind_of[d], s, FORWARD]
                    if s + 1 < S:
                        line_f[s] = max(line_f[s], free[s]) + occ[d, devices[s + 1]]
                        came_f[s + 1, m] = line_f[s] + lat[d, devices[s + 1]]
                    n_f[s] += 1
                elif n_b[s] < share:
                    m = n_b[s]
                    if s + 1 < S and n_b[s + 1] <= m:
                        break
                    start = free[s] if s + 1 == S else max(free[s], came_b[s, m])
                    free[s] = start + work[kind_of[d], s, BACKWARD]
                    if s > 0:
                        line_b[s] = max(line_b[s], free[s]) + occ[d, devices[s - 1]]
                        came_b[s - 1, m] = line_b[s] + lat[d, devices[s - 1]]
                    n_b[s] += 1
                else:
                    break
                left -= 1
    worst = 0.0
    for s in range(S):
        done[s] = free[s]
        worst = max(worst, free[s])
    return worst


@compiled
def exchange_s(place, at, lat, per_byte, sizes, tied, slice_bytes, ends):
    """Averaging among replicas, and of a tied token table among the first and last stage. at [S, P] says when each
    peer offers its gradient; ends [S] receives when a stage's last member holds the result. A link is busy with the
    sender's shards and then with its sums, the last slice of which leaves when everybody's has come."""
    S, P = place.shape
    ready = np.empty((S, P))
    for s in range(S):
        outer = tied if s == 0 or s == S - 1 else 0.0
        for o in range(P):
            late = at[s, o]
            for t in range(S):
                if t == s or (outer > 0 and (t == 0 or t == S - 1)):
                    own = sizes[s] / P if t == s else 0.0
                    n_bytes = own + outer / (2 * P)
                    for m in range(P):
                        if t != s or m != o:
                            src, dst = place[t, m], place[s, o]
                            late = max(late, at[t, m] + n_bytes * per_byte[src, dst] + lat[src, dst])
            ready[s, o] = late
    worst = 0.0
    for s in range(S):
        outer = tied if s == 0 or s == S - 1 else 0.0
        ends[s] = 0.0
        for m in range(P):
            ends[s] = max(ends[s], ready[s, m])
            for t in range(S):
                if t == s or (outer > 0 and (t == 0 or t == S - 1)):
                    own = sizes[s] / P if t == s else 0.0
                    n_bytes = own + outer / (2 * P)
                    for o in range(P):
                        if t != s or o != m:
                            src, dst = place[t, o], place[s, m]
                            last = ready[t, o] + min(n_bytes, slice_bytes) * per_byte[src, dst]
                            sent = max(at[t, o] + 2 * n_bytes * per_byte[src, dst], last)
                            ends[s] = max(ends[s], sent + lat[src, dst])
        worst = max(worst, ends[s])
    return worst


@compiled
def close_step(place, home, kind_of, work, lat, per_byte, sizes, tied, slice_bytes, done, at, ends, longest):
    """(step's seconds, what annealing minimises) of pipelines whose stages are done [P, S] at the given times."""
    S, P = place.shape
    for s in range(S):
        for p in range(P):
            at[s, p] = done[p, s] + work[kind_of[place[s, p]], s, GATHER]
    averaged = exchange_s(place, at, lat, per_byte, sizes, tied, slice_bytes, ends)
    step = averaged
    for s in range(S):
        for p in range(P):
            step = max(step, ends[s] + lat[place[s, p], home])
    return step, step + SOFT * (longest.mean() + ends.mean())


@compiled
def estimate(place, kind_of, work, lat, occ, per_byte, sizes, tied, slice_bytes, shares, depth, longest):
    """Seconds of a step; longest [P] receives when each pipeline's last backward is over."""
    S, P = place.shape
    done = np.empty((P, S))
    home = place.min()  # the coordinator sits beside the first peer
    for p in range(P):
        longest[p] = pipeline_s(
            np.ascontiguousarray(place[:, p]), home, kind_of, work, lat, occ, shares[p], depth, done[p]
        )
    at, ends = np.empty((S, P)), np.empty(S)
    return close_step(place, home, kind_of, work, lat, per_byte, sizes, tied, slice_bytes, done, at, ends, longest)[0]


@compiled
def balance(place, kind_of, work, lat, occ, shares, depth):
    """Move microbatches from the pipeline that ends last to the one that would still end first, in place."""
    S, P = place.shape
    done = np.empty(S)
    now, more = np.empty(P), np.empty(P)
    home = place.min()
    for p in range(P):
        path = np.ascontiguousarray(place[:, p])
        now[p] = pipeline_s(path, home, kind_of, work, lat, occ, shares[p], depth, done)
        more[p] = pipeline_s(path, home, kind_of, work, lat, occ, shares[p] + 1, depth, done)
    for _ in range(shares.sum()):
        last, first = np.argmax(now), np.argmin(more)
        if last == first or shares[last] == 1 or more[first] >= now[last]:
            break
        shares[last] -= 1
        shares[first] += 1
        for p in (last, first):
            path = np.ascontiguousarray(place[:, p])
            now[p] = pipeline_s(path, home, kind_of, work, lat, occ, shares[p], depth, done)
            more[p] = pipeline_s(path, home, kind_of, work, lat, occ, shares[p] + 1, depth, done)


@compiled
def may_hold(d, s, room, need):
    return need[s] <= room[d]


@compiled
def anneal_step(
    place,
    spare,
    best,
    best_spare,
    kind_of,
    work,
    lat,
    occ,
    per_byte,
    sizes,
    tied,
    slice_bytes,
    shares,
    depth,
    room,
    need,
    rng,
    heat,
    n,
):
    """Anneal place [S, P] by swaps of two devices, placed or spare, from temperature `heat` (a part of the step) down.
    need [S] is each stage's memory, room [N] each device's. `best`, `best_spare` receive the best."""
    S, P = place.shape
    done, trial = np.empty((P, S)), np.empty((2, S))
    longest = np.empty(P)
    at, ends = np.empty((S, P)), np.empty(S)
    home = place.min()  # kept while devices move: the caller estimates the result anew
    for p in range(P):
        longest[p] = pipeline_s(
            np.ascontiguousarray(place[:, p]), home, kind_of, work, lat, occ, shares[p], depth, done[p]
        )
    step, cost = close_step(
        place, home, kind_of, work, lat, per_byte, sizes, tied, slice_bytes, done, at, ends, longest
    )
    best_step = step
    best[:] = place
    best_spare[:] = spare
    hot = heat * step
    for k in range(n):
        temperature = hot * (1.0 - k / n) + 1e-9
        i, p = below(rng, S), below(rng, P)
        other = below(rng, S * P + spare.shape[0])
        outside = other >= S * P
        j, q = (i, p) if outside else (other // P, other % P)
        d = place[i, p]
        e = spare[other - S * P] if outside else place[j, q]
        if d == e or not may_hold(e, i, room, need) or (not outside and not may_hold(d, j, room, need)):
            continue
        place[i, p] = e
        if outside:
            spare[other - S * P] = d
        else:
            place[j, q] = d
        old_p, old_q = longest[p], longest[q]
        trial[0], trial[1] = done[p], done[q]
        longest[p] = pipeline_s(
            np.ascontiguousarray(place[:, p]), home, kind_of, work, lat, occ, shares[p], depth, done[p]
        )
        if q != p:
            longest[q] = pipeline_s(
                np.ascontiguousarray(place[:, q]), home, kind_of, work, lat, occ, shares[q], depth, done[q]
            )
        step, new = close_step(
            place, home, kind_of, work, lat, per_byte, sizes, tied, slice_bytes, done, at, ends, longest
        )
        if new <= cost - temperature * np.log(1.0 - unit(rng)):
            cost = new
            if step < best_step:
                best_step = step
                best[:] = place
                best_spare[:] = spare
            continue
        done[q], longest[q] = trial[1], old_q
        done[p], longest[p] = trial[0], old_p
        place[i, p] = d
        if outside:
            spare[other - S * P] = e
        else:
            place[j, q] = e
