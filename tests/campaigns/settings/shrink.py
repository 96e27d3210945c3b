"""Find the settings that a failure depends on: `python -m tests.campaigns.settings.shrink SEED [SECONDS]`.

Settings are removed one after another while the trial still fails in the same way. A trial that takes more
than SECONDS (20) counts as a hang.
"""

import json
import sys

from tests.campaigns.settings import FOLDER, Trials, models


def main() -> int:
    """Run the command; returns 1 if the trial does not fail."""
    seed, max_wait = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 20.0
    trials = Trials(models(FOLDER), max_wait=max_wait)
    name, overrides = trials.settings_of(seed)
    first = trials.run_settings(seed, name, overrides)
    if first.verdict != "failed":
        print(f"seed {seed}: {first.verdict} {first.detail}")
        return 1
    for setting in [key for key in overrides if key not in ("port", "profile")]:
        fewer = {key: value for key, value in overrides.items() if key != setting}
        outcome = trials.run_settings(seed, name, fewer)
        if outcome.verdict == "failed" and outcome.kind == first.kind:
            overrides = fewer
        print(f"without {setting}: {outcome.verdict} {outcome.kind}", flush=True)
    del overrides["port"]
    print(json.dumps({"seed": seed, "kind": first.kind, "model": name, "settings": overrides}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
