"""Plans of pools (hybrid parameter servers, Sec. 3.3): clusters of reliable devices, their order as stages, roles of
servers, workers, layers. Imports planner.cost and planner.model.
"""
