"""Expected behavior under faults, family by family: the table that claim C19 checks cell by cell.

A family stands for methods of the literature that fail in the same way; its `examples` are the strategies that are run.
Each of the four `Expectation`s has the text of the expectation and the observations of `testing.failures` that
fulfill it. An expectation may depend on the kind of a lost message. Pipelines are missing, because flockstep has none.
"""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.testing import failures as f


@dataclass(frozen=True)
class Short:
    """A known difference from the expected result: its reason, and the observations that it explains."""

    why: str
    seen: tuple[str, ...]


@dataclass(frozen=True)
class Expectation:
    """An expectation, and the observations that fulfill it; a word that ends in … matches as a prefix."""

    expected: str
    words: tuple[str, ...]
    short: Short | None = None
    """Known difference of flockstep from the expectation, if there is one."""
    kind: str = ""
    """Kind of the lost message; empty for all kinds without a cell of their own."""

    def holds(self, word: str) -> bool:
        """Whether an observation fulfills the expectation."""
        return any(word == said or (said.endswith("…") and word.startswith(said[:-1])) for said in self.words)

    def why(self, word: str) -> str:
        """Reason why an observation differs from the expectation; empty if it does not."""
        if self.holds(word):
            return ""
        return self.short.why if self.short is not None and word in self.short.seen else f"unexpected: {word}"


@dataclass(frozen=True)
class Family:
    """Methods that fail in the same way."""

    name: str
    examples: tuple[str, ...]
    equal: Expectation
    dead: Expectation
    lost: tuple[Expectation, ...]
    slow: Expectation


AT_EVERY_STEP = Expectation("at every step, bit for bit", (f.EVERY_STEP,))
AFTER_DRAIN = Expectation("once all updates have arrived", (f.DRAINED,))
ON_THE_SERVER = Expectation("on the server only", (f.COPIES,))
AS_LR_FADES = Expectation("as lr → 0", (f.DRAWN,))
NOT_AT_ONCE = Expectation("never", (f.NEVER, f.DRAWN))

NO_REPAIR = Short(
    "no worker takes over the data or the tasks of the dead worker: the run ends with a sentence that names it",
    (f.ENDS,),
)
NO_REPEAT = Short(
    "messages are not repeated, for the transports lose none; the push asks for parameters, too, so its sender waits",
    (f.ONE_STALLS,),
)
NO_SKIP = Short("the exchange is not closed without a message: it ends, or stalls, and says so", (f.ENDS, f.STALLS))
NOT_ASKED_AGAIN = Short("the server has everything, but a worker that is done does not ask again", (f.COPIES,))

SURVIVORS_GO_ON = (f.GOES_ON, f.WAITS, f.EXACT)
NONE = Expectation("no effect on the others", (f.FREE,))
EVERYONE = Expectation("everyone s×", (f.EVERYONE,))
STALL = Expectation("all workers stall, or the death is noticed", (f.STALLS, f.ENDS))
UNAFFECTED = Expectation("the others continue", (f.GOES_ON,))
EVICTED = Expectation("all workers wait until the dead worker is removed", (f.WAITS,))

FAMILIES = (
    Family(
        "all-reduce (DDP, Horovod, FireCaffe, CaffeOnSpark)",
        ("all_reduce", "bucketed", "powersgd", "tree_server"),
        AT_EVERY_STEP,
        Expectation("noticed; the ring is closed with P - 1", SURVIVORS_GO_ON, NO_REPAIR),
        (STALL,),
        EVERYONE,
    ),
    Family(
        "distributed server (BigDL)",
        ("scatter_reduce",),
        AT_EVERY_STEP,
        Expectation("its slice is taken over from a replica", SURVIVORS_GO_ON, NO_REPAIR),
        (STALL,),
        EVERYONE,
    ),
    *(
        Family(
            f"backup workers, b = {b}",
            (f"ps(consistency=backup(b={b}))",),
            AT_EVERY_STEP,
            Expectation(f"no effect up to {b} dead workers", (f"{f.GOES_ON}, up to {b} of 4",)),
            (Expectation("counts as a straggler", (f.CONTENT_LOST, f.NO_EFFECT)),),
            Expectation(f"hidden up to {b}", (f"hidden up to {b} of 4",)),
        )
        for b in (1, 2)
    ),
    Family(
        "gradient coding, s = 1",
        ("gradient_coding",),
        AT_EVERY_STEP,
        Expectation("no effect up to 1 dead worker, exact result", (f"{f.EXACT}, up to 1 of 4",)),
        (
            Expectation("free up to 1", (f.NO_EFFECT,), kind="coded"),
            Expectation(
                "free up to 1",
                (f.NO_EFFECT,),
                Short("a worker that misses new parameters is a version behind and waits at the end", (f.LATE_STALL,)),
            ),
        ),
        Expectation("hidden up to 1", ("hidden up to 1 of 4",)),
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
        (Expectation("that clock stalls", (f.STALLS,)),),
        Expectation("free for s clocks, then s×", ("free for …",)),
    ),
    Family(
        "eager bounded staleness (ESSP)",
        ("ps(consistency=essp(s=3))",),
        AFTER_DRAIN,
        EVICTED,
        (
            Expectation(
                "that clock stalls",
                (f.STALLS,),
                Short(
                    "no worker asks, so none waits: the next copy makes up for a lost one",
                    (f.UPDATE_LOST, f.CONTENT_LOST),
                ),
            ),
        ),
        Expectation("free for s clocks, then s×", ("free for …",)),
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
        (Expectation("stalls", (f.STALLS,)),),
        Expectation("free up to the bound, then s×", ("free for …", f.EVERYONE)),
    ),
    Family(
        "asynchronous server (Downpour, ASGD, MXNet)",
        ("asgd", "downpour"),
        ON_THE_SERVER,
        UNAFFECTED,
        (Expectation("that update is lost; repeated until acknowledged", (f.UPDATE_LOST, f.NO_EFFECT), NO_REPEAT),),
        NONE,
    ),
    Family(
        "n-softsync",
        ("ps(consistency=softsync(n=1))",),
        ON_THE_SERVER,
        UNAFFECTED,
        (Expectation("that update is lost; repeated until acknowledged", (f.UPDATE_LOST, f.NO_EFFECT), NO_REPEAT),),
        Expectation("small", (f.FREE, f.PARTLY)),
    ),
    Family(
        "all to all (FAST)",
        ("broadcast",),
        AFTER_DRAIN,
        Expectation("the others continue, and agree on what it had sent", (f.GOES_ON,)),
        (Expectation("replicas no longer agree", (f.UPDATE_LOST,)),),
        NONE,
    ),
    Family(
        "partial, rest dropped",
        ("partial(rest='drop')",),
        Expectation("never", (f.NEVER,)),
        UNAFFECTED,
        (Expectation("the normal case", (f.UPDATE_LOST,)),),
        NONE,
    ),
    Family(
        "partial, rest deferred",
        ("partial",),
        AFTER_DRAIN,
        UNAFFECTED,
        (
            Expectation(
                "nothing: it is kept until acknowledged",
                (f.NO_EFFECT,),
                Short("a residual is dropped when it is sent", (f.UPDATES_LOST,)),
            ),
        ),
        NONE,
    ),
    Family(
        "SPARTA",
        ("sparta(p=0.3)",),
        NOT_AT_ONCE,
        Expectation("left out of the mean", SURVIVORS_GO_ON, NO_REPAIR),
        (Expectation("these coordinates are skipped", (f.CONTENT_LOST,), NO_SKIP),),
        EVERYONE,
    ),
    Family(
        "D-PSGD",
        ("dpsgd",),
        AS_LR_FADES,
        Expectation("the graph is rewired", (f.WAITS,)),
        (STALL,),
        Expectation("diffuses to all", (f.SPREADS,)),
    ),
    Family(
        "AD-PSGD",
        ("adpsgd",),
        AS_LR_FADES,
        Expectation("its partner stops waiting for it", (f.WAITS, f.GOES_ON)),
        (
            Expectation(
                "both halves of the average are lost, or none",
                (f.NO_EFFECT, f.CONTENT_LOST),
                Short("the partner of a lost half waits forever", (f.ONE_STALLS,)),
            ),
        ),
        NONE,
    ),
    Family(
        "SGP",
        ("sgp",),
        AS_LR_FADES,
        Expectation("its mass is lost, the others continue", (f.WAITS, f.GOES_ON)),
        (Expectation("parameters and weight are lost together", (f.UPDATE_LOST,)),),
        Expectation("out-peers wait", (f.SPREADS,)),
    ),
    Family(
        "GoSGD",
        ("gossip(p=0.5)",),
        AS_LR_FADES,
        Expectation("its weight is lost, the others continue", (f.GOES_ON,)),
        (Expectation("its weight is lost", (f.UPDATE_LOST,)),),
        NONE,
    ),
    Family(
        "elastic averaging (EASGD, EAMSGD, DeepSpark)",
        ("easgd(period=10)", "eamsgd", "deepspark"),
        NOT_AT_ONCE,
        UNAFFECTED,
        (
            Expectation("the force acts on one side only", (f.CONTENT_LOST, f.UPDATE_LOST), kind="push"),
            Expectation(
                "the force acts on one side only",
                (f.CONTENT_LOST, f.UPDATE_LOST),
                Short("the worker that asked for the center waits for it", (f.ONE_STALLS,)),
            ),
        ),
        NONE,
    ),
    Family(
        "elastic averaging on a tree",
        ("tree_easgd(branching=2, up=2, down=2, upper=4)",),
        NOT_AT_ONCE,
        UNAFFECTED,
        (Expectation("the force acts on one side only", (f.CONTENT_LOST, f.UPDATE_LOST)),),
        NONE,
    ),
    Family(
        "local SGD (SparkNet, BMUF, DiLoCo)",
        ("local_sgd", "local_sgd(period=6, outer_optimizer=nesterov)"),
        Expectation("at every meeting", ("every …",)),
        Expectation("the mean of the survivors", SURVIVORS_GO_ON, NO_REPAIR),
        (Expectation("that round goes without it", (f.CONTENT_LOST, f.UPDATES_LOST), NO_SKIP),),
        Expectation("free up to the meeting, then s×", ("free for …",)),
    ),
    Family(
        "Streaming DiLoCo",
        ("streaming_diloco(period=8, fragments=2, overlap=2)",),
        Expectation("never all at once", (f.NEVER, f.DRAWN)),
        Expectation("the mean of the survivors, by fragment", SURVIVORS_GO_ON, NO_REPAIR),
        (Expectation("that fragment is not merged", (f.CONTENT_LOST, f.UPDATES_LOST), NO_SKIP),),
        Expectation("hidden up to the overlap", ("free for …",)),
    ),
    Family(
        "MPCA-SGD",
        ("mpca",),
        Expectation("never", (f.NEVER, f.DRAWN)),
        Expectation("the tree gets another root", SURVIVORS_GO_ON, NO_REPAIR),
        (
            Expectation(
                "that round is skipped",
                (f.CONTENT_LOST, f.NO_EFFECT),
                Short("the round never ends: all workers continue, and wait at the end", (f.LATE_STALL,)),
            ),
        ),
        NONE,
    ),
)
"""All families of the failure table."""
