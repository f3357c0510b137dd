"""Finding plans by simulated step time."""
