"""What a plan costs: matching, routing, bounds."""
