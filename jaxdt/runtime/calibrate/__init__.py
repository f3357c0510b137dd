"""Measurements and checks of a host and its links: seconds of a stage, of a layer and of a message; bandwidths.

May import `loop`, `storage` and `net` of the runtime, and everything below the runtime."""
