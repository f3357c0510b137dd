"""Predicted against measured step times: hosts with links between them, and the page of both comparisons, `emulated`
and `hosts`."""
