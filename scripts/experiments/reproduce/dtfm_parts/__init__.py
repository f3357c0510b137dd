"""What experiments.reproduce.dtfm shows: the systems that it simulates, and the costs of their placements."""
