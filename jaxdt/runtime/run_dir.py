"""The folder of one run, and what every process of the run reads from it."""

import json
import secrets
import shutil
from pathlib import Path

from jaxdt.core import plain
from jaxdt.core.config import RunConfig
from jaxdt.core.errors import BadInput
from jaxdt.core.plan import Plan, to_json
from jaxdt.runtime import credential

CONFIG_PY = '''"""The resolved config of a run, as a config file: its fields stand in config.json."""

import json
from pathlib import Path

from ml_collections import ConfigDict


def get_config():
    return ConfigDict(json.loads(Path(__file__).with_name("config.json").read_text()))
'''


def write_job(folder: Path, config: RunConfig, plan: Plan) -> None:
    """All that the processes of a run must share: config.py, config.json, plan.json, run (its name, new each time) and
    the credential, which a resumed run keeps."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(plain.write(config), indent=1) + "\n")
    (folder / "config.py").write_text(CONFIG_PY)
    (folder / "plan.json").write_text(json.dumps(to_json(plan), indent=1) + "\n")
    (folder / "run").write_text(secrets.token_hex(6) + "\n")
    if not (folder / "credential.pem").exists():
        credential.create(folder / "credential.pem")


def job_flags(folder: Path) -> list[str]:
    """The flags by which a process joins the run whose job was written into the folder."""
    return [
        f"--config={folder / 'config.py'}",
        f"--plan={folder / 'plan.json'}",
        f"--run={(folder / 'run').read_text().strip()}",
        f"--credential={folder / 'credential.pem'}",
    ]


def clear(run_dir: Path, overwrite: bool) -> None:
    """Refuse a folder in use; with `overwrite` delete it if it is a run's."""
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return
    if not (run_dir / "config.json").exists():
        raise BadInput(f"run_dir: {run_dir} is not empty and not a run's folder, expected a new or empty one")
    if not overwrite:
        raise BadInput(f"run_dir: {run_dir} holds another run, expected a new one, or --overwrite")
    shutil.rmtree(run_dir)
