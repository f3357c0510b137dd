#!/usr/bin/env bash
# Trains a small GPT on this machine: 4 processes, 2 stages x 2 pipelines, over an emulated four-city network.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh ""
python scripts/launch.py --config=configs/quickstart.py --emulate=configs/networks/four_cities.json \
    --run_dir=runs/quickstart --overwrite "$@"
echo
python scripts/sample.py --run_dir=runs/quickstart --prompt="It is a truth " --n_tokens=300
echo
echo "runs/quickstart holds summary.json, metrics.jsonl, report.png and timeline.json (open it in ui.perfetto.dev)"
python - <<'CHECK'
import json
import sys

summary = json.load(open("runs/quickstart/summary.json"))
first, last = summary["loss_first"], summary["loss_last"]
print(f"loss_last {last:.4f}, loss_first {first:.4f}: ratio {last / first:.3f}, expected below 0.8")
sys.exit(0 if last < 0.8 * first else 1)
CHECK
