"""Plans of pools (hybrid parameter servers): clusters of reliable devices, their order as stages, roles of
servers, workers, layers. Imports planner.cost and planner.model.
"""
