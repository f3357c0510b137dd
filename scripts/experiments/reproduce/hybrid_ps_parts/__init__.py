"""The hybrid parameter-server paper's planner: the cluster of its Figure 5, a toy to work by hand, the page."""
