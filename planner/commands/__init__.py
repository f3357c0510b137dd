"""The commands of `python -m planner`."""
