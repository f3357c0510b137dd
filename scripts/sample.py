"""Write text with the model of a run: python scripts/sample.py --run_dir=runs/x --prompt="It was" --n_tokens=300"""

import json
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np  # noqa: E402
from absl import flags  # noqa: E402

from jaxdt.cli import run_flags  # noqa: E402
from jaxdt.model.sample import assemble, generate  # noqa: E402
from jaxdt.model.tokenizer import load_tokenizer  # noqa: E402
from jaxdt.runtime.storage.checkpoint import load_entries, newest  # noqa: E402
from jaxdt.spec import config as configs  # noqa: E402
from jaxdt.spec.errors import BadInput  # noqa: E402

CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A checkpoint's folder; by default the newest of run_dir.")
PROMPT = flags.DEFINE_string("prompt", "It is a truth ", "The beginning of the text.")
N_TOKENS = flags.DEFINE_integer("n_tokens", 300, "How many tokens to add.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 always takes the likeliest token.")
SEED = flags.DEFINE_integer("seed", 0, "Of the draws.")


def main() -> int:
    run_flags.required("run_dir")
    run_dir = Path(run_flags.RUN_DIR.value)
    try:
        config = configs.parse(json.loads((run_dir / "config.json").read_text()))
    except (OSError, ValueError, TypeError, BadInput) as error:
        raise BadInput(f"run_dir: {run_dir} holds no run (config.json: {error})") from None
    tokenizer = load_tokenizer(run_flags.token_file(config.data.path).tokenizer)
    folder = Path(CHECKPOINT.value) if CHECKPOINT.value else newest(run_dir)
    params = assemble(config.model, [{name: entry["params"]} for name, entry in load_entries(folder).items()])
    prompt = tokenizer.encode(PROMPT.value.encode()).tolist()
    if not prompt:
        raise BadInput("--prompt: got an empty text, expected at least one token")
    tokens = generate(config.model, params, prompt, N_TOKENS.value, TEMPERATURE.value, SEED.value)
    print(tokenizer.decode(np.array(prompt + tokens)).decode(errors="replace"))
    return 0


if __name__ == "__main__":
    run_flags.run(main)
