"""Who is in the run: the sides of a peer and of the coordinator."""
