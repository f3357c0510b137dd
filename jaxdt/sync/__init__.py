"""How the replicas of a stage agree."""
