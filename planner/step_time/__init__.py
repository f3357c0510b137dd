"""Plans by simulated step time: what a step needs of each device, a compiled estimate of its seconds, annealing on that
estimate, the choice of shape and devices, and the simulator as the judge.

May import planner.search and what is below it, and jaxdt.sim.
"""
