"""What the planner prints and draws."""
