"""Who is alive and does its part: leases, broken links, peers that fail, hang, fall silent, or claim a taken id.

These are parts of the coordinator, but for `work_watch`, which is a member's. They may import what
`jaxdt.membership` may.
"""
