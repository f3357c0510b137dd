"""Write text with the model of a run.

    python scripts/sample.py --run_dir=runs/x --prompt="It was" --n_tokens=300

Uses the newest checkpoint of the run that is whole and computes on the CPU. The text ends where the model ends it, if
it came with a tokenizer that says how. With --chat the prompt is a message to a model that came with a chat template
(import_model.py), and what is printed is the answer.
"""

import check_installed  # noqa: F401

# isort: split
import sys
from pathlib import Path

import numpy as np
from absl import flags

from jaxdt.cli import environment, option_flags, run_inputs, script_main
from jaxdt.cli.run_inputs import ProcessOptions
from jaxdt.model.chat import chat_prompt
from jaxdt.model.sample import assemble, generate
from jaxdt.run import config as configs
from jaxdt.run.errors import BadInput, read_text, require_at_least, why
from jaxdt.run.run_folder import RunFolders
from jaxdt.run.serialize import parse_json
from jaxdt.runtime.storage.checkpoint import about_run, newest_whole
from jaxdt.runtime.storage.entries import load_entries, load_parts, whole_params
from jaxdt.runtime.storage.model_folder import IN_A_RUN, ORIGIN

option_flags.define(ProcessOptions, "run_dir")
CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Folder of a checkpoint; by default the newest whole one of run_dir."
)
PROMPT = flags.DEFINE_string("prompt", "It is a truth ", "The beginning of the text.")
CHAT = flags.DEFINE_bool("chat", False, "The prompt is a message, which the model answers.")
N_TOKENS = flags.DEFINE_integer("n_tokens", 300, "How many tokens to add.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 always takes the most probable token.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the random draws.")


def main() -> int:
    environment.compute_on_cpu()
    run_dir = RunFolders.of(Path(script_main.required("run_dir"))).run_dir
    require_at_least("--n_tokens", N_TOKENS.value, 1)
    if not (run_dir / "config.json").exists():
        raise BadInput(f"run_dir: {run_dir} has no config.json, expected the folder of a run")
    try:
        config = configs.parse(parse_json(read_text(run_dir / "config.json")))
    except (ValueError, TypeError, BadInput) as error:
        raise BadInput(f"run_dir: {run_dir} holds no run (config.json: {error})") from None
    data = run_inputs.token_file(config.data.path)
    origin = RunFolders.of(run_dir).job / IN_A_RUN / ORIGIN
    tokenizer, ends = run_inputs.tokenizer_of(data, origin)
    text = chat_prompt(origin, PROMPT.value) if CHAT.value else PROMPT.value
    if CHECKPOINT.value:
        entries = load_entries(Path(CHECKPOINT.value))
    else:
        found, problems = newest_whole(run_dir, about_run(config, data.checksum))
        for problem in problems:
            print(f"a newer checkpoint cannot be used, so this is of step {found.version}: {problem}", file=sys.stderr)
        entries = load_parts(found.record.checkpoint.parts, [found.folder])
    names = entries.keys() | {entry.name for entry in config.model.facts.entries if not entry.n_trained}
    params = assemble(config.model, [{name: whole_params(config, name, entries.get(name))} for name in sorted(names)])
    try:
        prompt = tokenizer.encode_prompt(text.encode()).tolist()
    except ValueError as error:
        raise BadInput(f"--prompt: {tokenizer.name} cannot encode it ({why(error)})") from None
    if not prompt:
        raise BadInput("--prompt: got an empty text, expected at least one token")
    options = (N_TOKENS.value, TEMPERATURE.value, SEED.value, config.seq_len)
    tokens = generate(config.model, params, prompt, *options, ends=ends, vocab_size=data.vocab_size)
    shown = tokens if CHAT.value else prompt + tokens
    print(tokenizer.decode(np.array(shown)).decode(errors="replace"))
    return 0


if __name__ == "__main__":
    script_main.run(main)
