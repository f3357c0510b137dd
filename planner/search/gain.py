"""Compiled circular local search on balanced partitions (DT-FM Sec. 3.4), with the paper's gain or Kernighan-Lin's.

A cycle moves a device from group to group until it is back at the group where it began, so sizes stay equal. Gains are
predictions made from hop weights w = pp_s: the caller scores the result by Eq. 1-4.
"""

import numpy as np

from planner.cost.compiled import compiled

DTFM, KERNIGHAN_LIN = 0, 1


@compiled
def _gain(w, label, sizes, d, target, rule):
    """Predicted saving of moving device d to the group `target`, one-sided."""
    total = 0.0
    inner = 0.0
    nearest = np.inf
    for x in range(label.shape[0]):
        if label[x] == target and x != d:
            total += w[d, x]
        elif label[x] == label[d] and x != d:
            inner += w[d, x]
            nearest = min(nearest, w[d, x])
    if rule == KERNIGHAN_LIN:
        return total - inner
    if nearest == np.inf or sizes[target] == 0:
        return -np.inf
    return total / sizes[target] - nearest


@compiled
def _candidates(w, label, locked, group, rule, out):
    """Devices of a group that may move: under the paper's gain both ends of its fastest link, else all. -> count."""
    n = 0
    if rule == KERNIGHAN_LIN:
        for d in range(label.shape[0]):
            if label[d] == group and not locked[d]:
                out[n] = d
                n += 1
        return n
    low = np.inf
    one, two = -1, -1
    for d in range(label.shape[0]):
        if label[d] == group:
            for x in range(d):
                if label[x] == group and w[d, x] < low:
                    low, one, two = w[d, x], d, x
    for d in (one, two):
        if d >= 0 and not locked[d]:
            out[n] = d
            n += 1
    return n


@compiled
def _best_move(w, label, sizes, locked, marked, group, first, rule, out):
    """(gain, device, target) of the best move out of a group, to an unmarked group or back to `first`."""
    best = -np.inf
    device, goal = -1, -1
    for c in range(_candidates(w, label, locked, group, rule, out)):
        for k in range(sizes.shape[0]):
            if k != group and (not marked[k] or k == first):
                gain = _gain(w, label, sizes, out[c], k, rule)
                if gain > best:
                    best, device, goal = gain, out[c], k
    return best, device, goal


@compiled
def _move(label, sizes, device, target):
    sizes[label[device]] -= 1
    sizes[target] += 1
    label[device] = target


@compiled
def _start_group(w, label, sizes, locked, marked, rule, out):
    best = -np.inf
    first = -1
    for group in range(sizes.shape[0]):
        if not marked[group]:
            gain, device, _ = _best_move(w, label, sizes, locked, marked, group, -1, rule, out)
            if device >= 0 and gain > best:
                best, first = gain, group
    return first


@compiled
def _cycle(w, label, sizes, locked, marked, first, rule, out):
    """One cycle from group `first`; returns its predicted gain, 0 if nothing was kept."""
    S = sizes.shape[0]
    moved = np.empty(S + 1, np.int64)
    came = np.empty(S + 1, np.int64)
    n = 0
    kept, best, total = -1, 0.0, 0.0
    group = first
    marked[first] = True
    while n <= S:
        gain, device, target = _best_move(w, label, sizes, locked, marked, group, first, rule, out)
        if device < 0:
            break
        if group != first:
            closing = _gain(w, label, sizes, device, first, rule)
            if total + closing > best:
                best, kept = total + closing, n
        moved[n], came[n] = device, group
        n += 1
        total += gain
        _move(label, sizes, device, target)
        locked[device] = True
        marked[target] = True
        group = target
        if group == first:
            break
    for t in range(n - 1, kept, -1):
        _move(label, sizes, moved[t], came[t])
    if kept >= 0:
        _move(label, sizes, moved[kept], first)
    return best


@compiled
def improve_pass(w, label, n_groups, rule):
    """One pass of at most n_groups cycles over `label` [N] (device -> group), in place; the prefix of cycles with the
    largest predicted gain is kept. Returns that gain."""
    sizes = np.zeros(n_groups, np.int64)
    for d in range(label.shape[0]):
        sizes[label[d]] += 1
    locked = np.zeros(label.shape[0], np.bool_)
    marked = np.zeros(n_groups, np.bool_)
    out = np.empty(label.shape[0], np.int64)
    best_label = label.copy()
    best, total = 0.0, 0.0
    for _ in range(n_groups):
        first = _start_group(w, label, sizes, locked, marked, rule, out)
        if first < 0:
            break
        total += _cycle(w, label, sizes, locked, marked, first, rule, out)
        if total > best + 1e-12:
            best = total
            best_label[:] = label
    label[:] = best_label
    return best
