"""The functions behind `import planner`: jobs, results, `solve`, `replan`, `explain` and `verify`. They print nothing.

May import planner.report and what is below it. The command line (planner.commands) is a layer over this folder.
"""
