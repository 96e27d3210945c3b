"""Find the settings that a failure needs: `python -m tests.campaigns.settings.shrink SEED [SECONDS]`.

Settings are left out one after the other, for as long as the trial fails in the same way. A hang counts after
SECONDS (20).
"""

import json
import sys

from tests.campaigns.settings import FOLDER, Trials, models


def main() -> int:
    """Run the command; returns 1 if the trial does not fail."""
    seed, patience = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 20.0
    trials = Trials(models(FOLDER), patience=patience)
    name, given = trials.settings_of(seed)
    first = trials.served(seed, name, given)
    if first.verdict != "failed":
        print(f"seed {seed}: {first.verdict} {first.detail}")
        return 1
    for setting in [key for key in given if key not in ("port", "profile")]:
        fewer = {key: value for key, value in given.items() if key != setting}
        outcome = trials.served(seed, name, fewer)
        if outcome.verdict == "failed" and outcome.kind == first.kind:
            given = fewer
        print(f"without {setting}: {outcome.verdict} {outcome.kind}", flush=True)
    del given["port"]
    print(json.dumps({"seed": seed, "kind": first.kind, "model": name, "settings": given}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
