"""What this host and its links can do: timings, checks."""
