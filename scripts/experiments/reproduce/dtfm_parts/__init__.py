"""The parts of experiments.reproduce.dtfm: the systems that it simulates, and the costs of their placements."""
