"""The commands that make something: `solve` by each objective, and `network`. May import all of the planner.

A module with run(flags) is a command; planner/__main__.py lists them and their flags. Commands that only show a plan
are in planner.report.
"""
