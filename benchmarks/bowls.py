"""Where every consistency rule lets four workers with different optima settle, by compute law and straggler.

Three workers have their optimum at 0 and the last one at 1; every gradient counts the same, so the parameter settles at
0.25 where all workers give as many gradients, and elsewhere at the last worker's share of them. One row per run: the
rule, the compute law, which worker takes twice as long, the mean of the parameter over time, each worker's share of the
gradients applied meanwhile, and the weights at which each worker's gradients were applied, in learning rates.

    python benchmarks/bowls.py [--steps 200] [--optimizer 'sgd(lr=0.03)'] [RULE ...]
"""

from __future__ import annotations

import argparse

from flockstep.testing.bowls import LAWS, STRAGGLERS, bowl

RULES = (
    "bsp", "ssp(3)", "cached_ssp(3)", "essp(3)", "ssp(3, weight=sum)", "bounded_delay(3)",
    "bounded_delay(3, weight=sum)", "value_bound(0.1)", "backup(1)",
    "k_sync(2)", "k_batch_sync(3)", "k_async(2)", "k_batch_async(3)", "softsync(2)", "asynchronous",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rules", nargs="*", default=RULES, metavar="RULE")
    parser.add_argument("--steps", type=int, default=200, help="steps of each worker")
    parser.add_argument("--optimizer", default="sgd(lr=0.03)")
    options = parser.parse_args()
    print(
        f"{'rule':<29}{'compute':<18}{'straggler':<11}{'mean of w':<11}{'share of gradients':<25}weight of a gradient"
    )
    for rule in options.rules:
        for law in LAWS:
            for straggler in STRAGGLERS:
                found = bowl(f"ps({rule})", law, straggler, options.steps, options.optimizer)
                shares = " ".join(f"{share:.3f}" for share in found.shares)
                weights = "  ".join(_range(each) for each in found.weights.values())
                print(f"{rule:<29}{law:<18}{straggler:<11}{found.mean:<11.3f}{shares:<25}{weights}")


def _range(weights: set[float]) -> str:
    """The weights of one worker's gradients: a single number where all are equal."""
    if not weights:
        return "none"
    least, most = f"{min(weights):.3f}", f"{max(weights):.3f}"
    return least if least == most else f"{least}-{most}"


if __name__ == "__main__":
    main()
