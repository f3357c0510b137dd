"""Compiled bottleneck matching (DT-FM Eq. 3): improve a perfect matching until its largest weight cannot fall."""

from planner.cost.compiled import compiled


@compiled
def lower_bound(pp, left, right, n):
    """Every device is matched: no matching beats the largest of all row and column minima."""
    best = 0.0
    for a in range(n):
        low_row = pp[left[a], right[0]]
        low_col = pp[left[0], right[a]]
        for b in range(1, n):
            low_row = min(low_row, pp[left[a], right[b]])
            low_col = min(low_col, pp[left[b], right[a]])
        best = max(best, low_row, low_col)
    return best


@compiled
def augment(pp, left, right, n, limit, start, match, back, seen, queue, parent):
    """Give row `start` a partner over weights < limit by one alternating path (breadth first); false if none."""
    for b in range(n):
        seen[b] = False
    queue[0] = start
    head, tail = 0, 1
    while head < tail:
        a = queue[head]
        head += 1
        for b in range(n):
            if seen[b] or pp[left[a], right[b]] >= limit:
                continue
            seen[b] = True
            parent[b] = a
            if back[b] < 0:
                while True:
                    a = parent[b]
                    previous = match[a]
                    match[a] = b
                    back[b] = a
                    if a == start:
                        return True
                    b = previous
            queue[tail] = back[b]
            tail += 1
    return False


@compiled
def improve(pp, left, right, n, match, floor, work):
    """Lower the bottleneck of the perfect matching `match` (row -> column) to the optimum, or to `floor`, a known
    lower bound. Returns the bottleneck; `match` attains it. `work` is int64 [5, n] of scratch."""
    trial, back, seen, queue, parent = work[0], work[1], work[2], work[3], work[4]
    worst = 0.0
    for a in range(n):
        worst = max(worst, pp[left[a], right[match[a]]])
    while worst > floor:
        for a in range(n):
            trial[a] = match[a]
            back[match[a]] = a
        for a in range(n):
            if pp[left[a], right[trial[a]]] >= worst:
                back[trial[a]] = -1
                trial[a] = -1
        for a in range(n):
            if trial[a] < 0 and not augment(pp, left, right, n, worst, a, trial, back, seen, queue, parent):
                return worst
        worst = 0.0
        for a in range(n):
            match[a] = trial[a]
            worst = max(worst, pp[left[a], right[match[a]]])
    return worst
