"""Finding plans by cost."""
