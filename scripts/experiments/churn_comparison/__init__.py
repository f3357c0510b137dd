"""Runs whose machines come and go as in a trace, real or simulated: what they have in common, and their results."""
