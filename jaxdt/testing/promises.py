"""What a run promises: the invariants, by number. A finding of the fuzzer names the promise that the run has broken.

1 to 11 and 26 hold where replicas stay equal (step protocol, Sec. 11), also for the servers of a pool, 12 to 14 besides
for a pool (hybrid parameter servers), 7 and 15 to 25 where replicas may differ. All are checked from outside: on
messages, actions, reports, durable values and on what tensors hold. In square brackets: the property of SDPipe's
scheduler (Miao et al., PVLDB 16(9), Sec. 3) that a promise stands for: [1] one group for every ready signal, [2]
members, [3] connectivity, [4] the token, [5] no deadlock, [6] windows, [7] known systems as special cases, [8] means
are preserved, [9] departures (replicas that are done leave their stages while others continue), [10] determinism (a
test that plays a case twice), [11] the variance of moments (arithmetic, tested where that is).
"""


class Promise(int):
    """The number of a promise, and the promise."""

    text: str

    def __new__(cls, number: int, text: str) -> "Promise":
        promise = super().__new__(cls, number)
        promise.text = text
        return promise


# ------------------------------------------------------------------------------------ replicas stay equal

COVER = Promise(
    1,
    """Each result counts every microbatch once, computed with the version of its step. Tensors are there when a machine
    wants them.""",
)
PREFIX = Promise(2, "The records that a member has applied are a prefix of the durable records.")
APPLICABLE = Promise(3, "Every member of the view can apply every durable record that it has not applied.")
GROWS = Promise(4, "Within a generation records only grow.")
SPARED = Promise(
    5,
    """Nothing is rolled back, and the run does not end, while each stage has a living peer that holds its committed
    version and has not been silent for the grace period. No view leaves a stage without members. Before the first view
    the run needs all peers. Living peers that hold the committed version and do not count:

    - a joining member, until the coordinator has heard that its state is here: before that it looks like one whose
      donor has died in mid-download, and the run would wait for it in vain
    - a peer outside of the view that was asked to leave or to move, or that an operator has evicted: it gives up its
      state because it was told to
    - a peer that was evicted before the coordinator was started again: what an evicted peer may hold is not made
      durable, since it matters only until the next step is committed
    - a peer whose present process was never a full member: the state with which a process starts is that of a
      checkpoint""",
)
DISJOINT = Promise(6, "No microbatch is in the accumulators of two live members of one view.")
PROGRESS = Promise(
    7,
    """The run ends within a stated time after the last fault is over [5].

    - Where replicas are equal its last row has the held-out loss of the parameters that it ends with. A run does not
      count if it waits, and has said so, for Work that never ends at the only peers that hold the state of a stage.
    - Where they may differ it ends with the result, unless a fault has taken a peer away or a gradient is not finite
      and the config says stop.""",
)
LIVING = Promise(
    8,
    """The coordinator itself takes no peer of the plan for lost that no fault may lose: neither for a pause of its own,
    nor for another coordinator, nor for another process of that peer. If two members accuse each other it may evict the
    living one. Peers that do not count:

    - a joining member while no message of the coordinator reaches it, since it does not hear of the view, or while the
      devices of all that hold the state of its stage hang: the step would wait for it in vain
    - a peer that a superseded coordinator has ended before the peer heard of the successor: when a person ends the run
      at that coordinator, the peer cannot know better, and its process is gone""",
)
EQUAL = Promise(
    9,
    """No step is committed for which replicas compare their states and differ beyond the tolerance, at version 0 at
    all.""",
)
COPIES = Promise(
    10,
    """When a checkpoint is announced as complete, each disk that it names holds the part, and each part is on as many
    disks of members as were asked for, or on those of all members that no fault has touched yet.""",
)
PAUSED = Promise(
    11,
    """From when an operator's pause is durable until an operator wants the run to be resumed no step is made durable,
    but for one that was being written when the pause began.""",
)

# ------------------------------------------------------------------------------------------------- pools

LEASED_TWICE = Promise(
    12,
    """A process of a server never grants two leases of one number, and its accumulator never holds a microbatch twice
    (the second half is checked where a contribution is added).""",
)
BOUNDED = Promise(
    13,
    """What is kept is bounded, and freed. A peer holds nothing of a step but from the version before the one that opens
    it, since others may have begun it, until the update of the step is over. Of one step

    - a server holds for each microbatch of its cut, and of those that it has taken from other servers, its input, its
      output and the gradients of both, and the residuals of as many forwards as 1F1B lets wait at one client, of one
      more beside workers, and of one that is done again; after a view in mid-step, when the servers do the rest by
      routes, all that of any microbatch
    - a worker holds inputs, outputs and residuals of the microbatches of its server.

    A server takes at most as many microbatches of a step as it owns. It holds vectors of the contributions that it has
    asked for and has neither added nor given up, one of each worker; a worker holds those that it was asked for. A peer
    waits for few wakings of one kind.""",
)
WHOLE_SUMS = Promise(
    14,
    """The servers' parts of a sum cover the step: no member asks to be evicted for a sum that does not.""",
)

# ------------------------------------------------------------------------------------ replicas may differ

ANSWERED = Promise(
    15,
    """Every replica that wants a group gets exactly one, and all members of a group are told so [1]. A replica wants
    one after the local steps that the config says, for the fragment that is due then.""",
)
MEMBERS = Promise(
    16,
    """Members of a group are replicas of the stage that have not gone, and wait; the groups of a stage are numbered one
    by one, and the steps of a replica grow [2, 7: the sizes that a rule allows].""",
)
ONE_MEAN = Promise(
    17,
    """All members that adopt a group's mean adopt the same number, once, and so do those of a mean of states [8].""",
)
CONNECTED = Promise(
    18,
    """Any P groups in a row connect the stage's replicas, or the last of them is marked as suspended, and no other
    group is marked [3].""",
)
TOKEN = Promise(
    19,
    """One stage at most waits beyond its window, and while a group is suspended another stage does [4].""",
)
WINDOW = Promise(20, "A group that is not enforced closes within the longest window [6].")
STALENESS = Promise(
    21,
    """No replica computes with a server's parameters that lack a push which the bound on staleness promises.""",
)
BUDGET = Promise(
    22,
    """The pipelines have done as many local steps as the run has, and no pipeline begins one after it has heard that
    these are enough. Every replica of a pipeline has done as many as the report of its end says.""",
)
REPLAYED = Promise(
    23,
    """The numbers of all replicas, after each local step and each mean, are those of a replay of the run's log, and so
    are the means for checkpoints and the held-out losses. A pipeline that comes back begins with the states of one
    other pipeline, all of one moment.""",
)
HELD = Promise(
    24,
    """Tensors are there when they are used, and the parameters of a forward are those of its step. A gradient is scaled
    by the mean over its samples, clipped by the norm over its pipeline or stage. A slice of a vector has as many bytes
    on its way as the codec says. What belongs to a round that is closed is let go.""",
)
ONE_CUT = Promise(
    25,
    """A servers' snapshot for a held-out loss or a checkpoint includes as many local steps of each pipeline at every
    stage.""",
)
GIVEN_BACK = Promise(
    26,
    """Where replicas are equal, what a codec has lost of a contribution is made up for once at most, in a round that
    counts, and only if the round in which it was lost counts too, and was not rolled back.""",
)
