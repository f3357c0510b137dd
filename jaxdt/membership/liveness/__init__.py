"""The watch over peers: leases, broken links, and peers that fail, hang, fall silent, or claim a taken id.

The modules are parts of the coordinator, but for `work_watch`, which is a member's. They may import what
`jaxdt.membership` may.
"""
