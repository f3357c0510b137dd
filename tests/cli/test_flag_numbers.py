"""Numbers of flags that a flag's own bounds let pass."""

import pytest
from absl import flags

from jaxdt.cli import script_main
from jaxdt.run.errors import BadInput


@pytest.mark.parametrize(("given", "is_refused"), [("nan", True), ("0.5", False)])
def test_nan_is_refused_although_it_is_within_all_bounds(given, is_refused):
    values = flags.FlagValues()
    flags.DEFINE_float("share", None, "The share that it takes.", 0.0, 1.0, flag_values=values)
    values(["script", f"--share={given}"])
    if is_refused:
        with pytest.raises(BadInput, match=r"^--share: got nan, expected a number \(The share that it takes\)$"):
            script_main.require_numbers(values)
    else:
        script_main.require_numbers(values)
