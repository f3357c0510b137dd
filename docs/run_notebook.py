"""Runs the code cells of a notebook in order and writes their output into it. Needs no Jupyter.

    python docs/run_notebook.py docs/first_run.ipynb

A cell's output is what it prints and the value of its last line: text, or a picture where the value has one.
"""

import ast
import base64
import contextlib
import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PARAMETERS = "parameters"  # the tag of the cell whose names a caller may set


def main(path: Path) -> None:
    notebook = json.loads(path.read_text())
    n_cells = sum(cell["cell_type"] == "code" for cell in notebook["cells"])
    print(f"running {n_cells} cells; what they print goes into the notebook", flush=True)
    for number, (cell, outputs) in enumerate(run_cells(notebook, {}), start=1):
        print(f"cell {number} of {n_cells} is done", flush=True)
        cell["execution_count"], cell["outputs"] = number, outputs
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {path}: {path.stat().st_size} bytes")


def run_cells(notebook: dict[str, Any], parameters: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], list[dict]]]:
    """Each code cell with its outputs, as it was run. `parameters` replace values that the cell with that tag sets."""
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        yield cell, _outputs("".join(cell["source"]), names)
        if PARAMETERS in cell["metadata"].get("tags", []):
            if unknown := set(parameters) - set(names):
                raise KeyError(f"parameters: the cell sets no {', '.join(sorted(unknown))}")
            names.update(parameters)


def _outputs(source: str, names: dict[str, Any]) -> list[dict]:
    *statements, last = ast.parse(source).body
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(statements, []), "<cell>", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
        else:
            exec(compile(ast.Module([*statements, last], []), "<cell>", "exec"), names)
    outputs: list[dict] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(True)})
    if value is not None:
        data: dict[str, Any] = {"text/plain": repr(value).splitlines(True)}
        if picture := getattr(value, "_repr_png_", None):
            data["image/png"] = base64.b64encode(picture()).decode()
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return outputs


if __name__ == "__main__":
    main(Path(sys.argv[1]))
