"""Expected behavior of each family of strategies under faults: the table that claim C19 checks.

A family stands for methods of the literature that fail in the same way; its `examples` are the strategies that are
run. Each of a family's four kinds of `Expectation` has a text for readers and the observations of
`flockstep_lab.failures` that fulfill the expectation. The expectation on a lost message may depend on the kind of
the message. Pipelines have no row.
"""

from __future__ import annotations

from dataclasses import dataclass

from flockstep_lab import failures as f


@dataclass(frozen=True)
class Short:
    """A known difference between flockstep and the behavior in the literature: the reason, and the observations that
    the reason explains.
    """

    why: str
    seen: tuple[str, ...]


@dataclass(frozen=True)
class Expectation:
    """Expected behavior under a fault: a text for readers, and the observations that fulfill the expectation.

    A word that ends in … matches every observation that begins with it.
    """

    expected: str
    words: tuple[str, ...]
    short: Short | None = None
    """Known difference between flockstep and the expectation; None if there is no difference."""
    kind: str = ""
    """Kind of lost message to which the expectation applies; empty for all kinds that have no expectation of their own.
    """

    def holds(self, word: str) -> bool:
        """Return whether an observation fulfills the expectation."""
        return any(word == said or (said.endswith("…") and word.startswith(said[:-1])) for said in self.words)

    def why(self, word: str) -> str:
        """Return why an observation differs from the expectation; empty if the observation fulfills the expectation."""
        if self.holds(word):
            return ""
        return self.short.why if self.short is not None and word in self.short.seen else f"unexpected: {word}"


@dataclass(frozen=True)
class Family:
    """Methods of the literature that fail in the same way, with the behavior expected under each kind of fault."""

    name: str
    examples: tuple[str, ...]
    equal: Expectation
    dead: Expectation
    lost: tuple[Expectation, ...]
    slow: Expectation


AT_EVERY_STEP = Expectation("equal at every step, bit for bit", (f.EVERY_STEP,))
AFTER_DRAIN = Expectation("equal once all updates have arrived", (f.DRAINED,))
ON_THE_SERVER = Expectation("only in the server's parameters", (f.COPIES,))
AS_LR_FADES = Expectation("as lr → 0", (f.DRAWN,))
NOT_AT_ONCE = Expectation("never", (f.NEVER, f.DRAWN))

NO_REPAIR = Short(
    "in flockstep no worker takes over the data or the tasks of the dead worker: the run ends with an error that "
    "names the dead worker",
    (f.ENDS,),
)
NO_REPEAT = Short(
    "flockstep does not repeat messages, because its transports lose none; a push also requests parameters, so its "
    "sender waits",
    (f.ONE_STALLS,),
)
NO_SKIP = Short(
    "flockstep never completes an exchange with a missing message: the run ends with an error, or stalls and "
    "reports the stall",
    (f.ENDS, f.STALLS),
)
NOT_ASKED_AGAIN = Short(
    "the server has every update, but a worker that has finished does not request the parameters again", (f.COPIES,)
)

SURVIVORS_GO_ON = (f.GOES_ON, f.WAITS, f.EXACT)
NONE = Expectation("no effect on the other workers", (f.FREE,))
EVERYONE = Expectation("all workers slow down", (f.EVERYONE,))
STALL = Expectation("all workers stall, or the death is detected", (f.STALLS, f.ENDS))
UNAFFECTED = Expectation("the other workers continue", (f.GOES_ON,))
EVICTED = Expectation("all workers wait until the dead worker is removed", (f.WAITS,))

FAMILIES = (
    Family(
        "all-reduce (DDP, Horovod, FireCaffe, CaffeOnSpark)",
        ("all_reduce", "bucketed", "powersgd", "tree_server"),
        AT_EVERY_STEP,
        Expectation("the death is detected, and the ring continues with P - 1 workers", SURVIVORS_GO_ON, NO_REPAIR),
        (STALL,),
        EVERYONE,
    ),
    Family(
        "distributed server (BigDL)",
        ("scatter_reduce",),
        AT_EVERY_STEP,
        Expectation("a replica takes over the dead worker's slice", SURVIVORS_GO_ON, NO_REPAIR),
        (STALL,),
        EVERYONE,
    ),
    *(
        Family(
            f"backup workers, b = {b}",
            (f"ps(consistency=backup(b={b}))",),
            AT_EVERY_STEP,
            Expectation(f"no effect of up to {b} dead workers", (f"{f.GOES_ON}, up to {b} of 4",)),
            (Expectation("the sender counts as a straggler", (f.CONTENT_LOST, f.NO_EFFECT)),),
            Expectation(f"no effect of up to {b} slow workers", (f"no effect of up to {b} of 4 slow workers",)),
        )
        for b in (1, 2)
    ),
    Family(
        "gradient coding, s = 1",
        ("gradient_coding",),
        AT_EVERY_STEP,
        Expectation("no effect of up to 1 dead worker: the result is exact", (f"{f.EXACT}, up to 1 of 4",)),
        (
            Expectation("no effect for 1 lost message", (f.NO_EFFECT,), kind="coded"),
            Expectation(
                "no effect for 1 lost message",
                (f.NO_EFFECT,),
                Short(
                    "a worker that misses new parameters stays one version behind, and waits at the end of training",
                    (f.LATE_STALL,),
                ),
            ),
        ),
        Expectation("no effect of up to 1 slow worker", ("no effect of up to 1 of 4 slow workers",)),
    ),
    Family(
        "bounded staleness (SSP)",
        ("ps(consistency=ssp(s=3))", "ps(consistency=bounded_delay(tau=4))"),
        Expectation(
            AFTER_DRAIN.expected,
            (f.DRAINED,),
            NOT_ASKED_AGAIN,
        ),
        EVICTED,
        (Expectation("all workers stall at the clock of the lost message", (f.STALLS,)),),
        Expectation("no effect for s clocks, then all workers slow down", ("no effect for …",)),
    ),
    Family(
        "eager bounded staleness (ESSP)",
        ("ps(consistency=essp(s=3))",),
        AFTER_DRAIN,
        EVICTED,
        (
            Expectation(
                "all workers stall at the clock of the lost message",
                (f.STALLS,),
                Short(
                    "workers do not request parameters, so no worker waits, and the next copy includes the lost update",
                    (f.UPDATE_LOST, f.CONTENT_LOST),
                ),
            ),
        ),
        Expectation("no effect for s clocks, then all workers slow down", ("no effect for …",)),
    ),
    Family(
        "bounded values (VAP)",
        ("ps(consistency=value_bound(delta=0.001))",),
        Expectation(
            AFTER_DRAIN.expected,
            (f.DRAINED, f.EVERY_STEP),
            NOT_ASKED_AGAIN,
        ),
        Expectation("all workers wait at the bound until the dead worker is removed", (f.WAITS,)),
        (Expectation("all workers stall", (f.STALLS,)),),
        Expectation("no effect up to the bound, then all workers slow down", ("no effect for …", f.EVERYONE)),
    ),
    Family(
        "asynchronous server (Downpour, ASGD, MXNet)",
        ("asgd", "downpour"),
        ON_THE_SERVER,
        UNAFFECTED,
        (Expectation("the update is lost, or repeated until acknowledged", (f.UPDATE_LOST, f.NO_EFFECT), NO_REPEAT),),
        NONE,
    ),
    Family(
        "n-softsync",
        ("ps(consistency=softsync(n=1))",),
        ON_THE_SERVER,
        UNAFFECTED,
        (Expectation("the update is lost, or repeated until acknowledged", (f.UPDATE_LOST, f.NO_EFFECT), NO_REPEAT),),
        Expectation("the other workers slow down a little", (f.FREE, f.PARTLY)),
    ),
    Family(
        "all to all (FAST)",
        ("broadcast",),
        AFTER_DRAIN,
        Expectation("the other workers continue, and agree on the updates that the dead worker had sent", (f.GOES_ON,)),
        (Expectation("replicas no longer agree", (f.UPDATE_LOST,)),),
        NONE,
    ),
    Family(
        "partial, rest dropped",
        ("partial(rest='drop')",),
        Expectation("never", (f.NEVER,)),
        UNAFFECTED,
        (Expectation("expected loss: updates that are not selected are dropped anyway", (f.UPDATE_LOST,)),),
        NONE,
    ),
    Family(
        "partial, rest deferred",
        ("partial",),
        AFTER_DRAIN,
        UNAFFECTED,
        (
            Expectation(
                "no effect: the update is kept until acknowledged",
                (f.NO_EFFECT,),
                Short(
                    "the sender deletes a residual when it sends the residual, without waiting for an acknowledgment",
                    (f.UPDATES_LOST,),
                ),
            ),
        ),
        NONE,
    ),
    Family(
        "SPARTA",
        ("sparta(p=0.3)",),
        NOT_AT_ONCE,
        Expectation("the dead worker is left out of the mean", SURVIVORS_GO_ON, NO_REPAIR),
        (Expectation("the parameters of the lost message are not averaged", (f.CONTENT_LOST,), NO_SKIP),),
        EVERYONE,
    ),
    Family(
        "D-PSGD",
        ("dpsgd",),
        AS_LR_FADES,
        Expectation("the dead worker's neighbors are connected to each other", (f.WAITS,)),
        (STALL,),
        Expectation("the delay spreads to all workers", (f.SPREADS,)),
    ),
    Family(
        "AD-PSGD",
        ("adpsgd",),
        AS_LR_FADES,
        Expectation("the partner stops waiting for the dead worker", (f.WAITS, f.GOES_ON)),
        (
            Expectation(
                "both halves of the averaging are lost, or neither",
                (f.NO_EFFECT, f.CONTENT_LOST),
                Short("the worker that does not receive its partner's half waits forever", (f.ONE_STALLS,)),
            ),
        ),
        NONE,
    ),
    Family(
        "SGP",
        ("sgp",),
        AS_LR_FADES,
        Expectation("the dead worker's mass is lost, and the other workers continue", (f.WAITS, f.GOES_ON)),
        (Expectation("the parameters and the weight in the lost message are lost together", (f.UPDATE_LOST,)),),
        Expectation("the receivers of the slow worker's messages wait", (f.SPREADS,)),
    ),
    Family(
        "GoSGD",
        ("gossip(p=0.5)",),
        AS_LR_FADES,
        Expectation("the dead worker's weight is lost, and the other workers continue", (f.GOES_ON,)),
        (Expectation("the weight in the lost message is lost", (f.UPDATE_LOST,)),),
        NONE,
    ),
    Family(
        "elastic averaging (EASGD, EAMSGD, DeepSpark)",
        ("easgd(period=10)", "eamsgd", "deepspark"),
        NOT_AT_ONCE,
        UNAFFECTED,
        (
            Expectation("the elastic force acts on one side only", (f.CONTENT_LOST, f.UPDATE_LOST), kind="push"),
            Expectation(
                "the elastic force acts on one side only",
                (f.CONTENT_LOST, f.UPDATE_LOST),
                Short("the worker that requested the center waits for the center", (f.ONE_STALLS,)),
            ),
        ),
        NONE,
    ),
    Family(
        "elastic averaging on a tree",
        ("tree_easgd(branching=2, up=2, down=2, upper=4)",),
        NOT_AT_ONCE,
        UNAFFECTED,
        (Expectation("the elastic force acts on one side only", (f.CONTENT_LOST, f.UPDATE_LOST)),),
        NONE,
    ),
    Family(
        "local SGD (SparkNet, BMUF, DiLoCo)",
        ("local_sgd", "local_sgd(period=6, outer_optimizer=nesterov)"),
        Expectation("at every synchronization", ("every …",)),
        Expectation("training continues with the mean of the remaining workers", SURVIVORS_GO_ON, NO_REPAIR),
        (Expectation("the round is averaged without the lost model", (f.CONTENT_LOST, f.UPDATES_LOST), NO_SKIP),),
        Expectation("no effect until the next synchronization, then all workers slow down", ("no effect for …",)),
    ),
    Family(
        "Streaming DiLoCo",
        ("streaming_diloco(period=8, fragments=2, overlap=2)",),
        Expectation("never all parameters at once", (f.NEVER, f.DRAWN)),
        Expectation(
            "training continues with the mean of the remaining workers, fragment by fragment",
            SURVIVORS_GO_ON,
            NO_REPAIR,
        ),
        (Expectation("the fragment is not merged in that round", (f.CONTENT_LOST, f.UPDATES_LOST), NO_SKIP),),
        Expectation("no effect for delays shorter than the overlap", ("no effect for …",)),
    ),
    Family(
        "MPCA-SGD",
        ("mpca",),
        Expectation("never", (f.NEVER, f.DRAWN)),
        Expectation("another worker becomes the root of the tree", SURVIVORS_GO_ON, NO_REPAIR),
        (
            Expectation(
                "the round is skipped",
                (f.CONTENT_LOST, f.NO_EFFECT),
                Short("the round never ends: all workers continue, and wait at the end of training", (f.LATE_STALL,)),
            ),
        ),
        NONE,
    ),
)
"""All families of strategies in the failure table."""
