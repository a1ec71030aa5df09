"""Expected behavior under faults, family by family: the table that claim C19 checks cell by cell.

A family stands for methods of the literature that fail in the same way; its `examples` are the strategies that are run.
Each of the four `Cell`s describes the expectation, and names the observations of `testing.failures` that fulfill it.
The expectation may depend on the kind of a lost message. Pipelines are missing, because flockstep has none.
"""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.testing import failures as f


@dataclass(frozen=True)
class Short:
    """Known difference from the expectation: the reason, and the observations to which the reason applies."""

    why: str
    seen: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
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
    equal: Cell
    dead: Cell
    lost: tuple[Cell, ...]
    slow: Cell


AT_EVERY_STEP = Cell("at every step, bit for bit", (f.EVERY_STEP,))
AFTER_DRAIN = Cell("once all updates have arrived", (f.DRAINED,))
ON_THE_SERVER = Cell("on the server only", (f.COPIES,))
AS_LR_FADES = Cell("as lr → 0", (f.DRAWN,))
NOT_AT_ONCE = Cell("never", (f.NEVER, f.DRAWN))

NO_REPAIR = Short(
    "nobody takes over what the dead worker held or did: the run ends with a sentence that names it", (f.ENDS,)
)
NO_REPEAT = Short(
    "messages are not repeated, for the transports lose none; the push asks for parameters, too, so its sender waits",
    (f.ONE_STALLS,),
)
NO_SKIP = Short("the exchange is not closed without a message: it ends, or stalls, and says so", (f.ENDS, f.STALLS))
NOT_ASKED_AGAIN = Short("the server has everything, but a worker that is done does not ask again", (f.COPIES,))

SURVIVORS_GO_ON = (f.GOES_ON, f.WAITS, f.EXACT)
NONE = Cell("no effect on the others", (f.FREE,))
EVERYONE = Cell("everyone s×", (f.EVERYONE,))
STALL = Cell("everyone stalls, or it is noticed", (f.STALLS, f.ENDS))
UNAFFECTED = Cell("the others go on", (f.GOES_ON,))
EVICTED = Cell("everyone waits, until it is taken out", (f.WAITS,))

FAMILIES = (
    Family(
        "all-reduce (DDP, Horovod, FireCaffe, CaffeOnSpark)",
        ("all_reduce", "bucketed", "powersgd", "tree_server"),
        AT_EVERY_STEP,
        Cell("noticed; the ring is closed with P - 1", SURVIVORS_GO_ON, NO_REPAIR),
        (STALL,),
        EVERYONE,
    ),
    Family(
        "distributed server (BigDL)",
        ("scatter_reduce",),
        AT_EVERY_STEP,
        Cell("its slice is taken over from a replica", SURVIVORS_GO_ON, NO_REPAIR),
        (STALL,),
        EVERYONE,
    ),
    *(
        Family(
            f"backup workers, b = {b}",
            (f"ps(consistency=backup(b={b}))",),
            AT_EVERY_STEP,
            Cell(f"free up to {b} dead", (f"{f.GOES_ON}, up to {b} of 4",)),
            (Cell("counts as a straggler", (f.CONTENT_LOST, f.NO_EFFECT)),),
            Cell(f"hidden up to {b}", (f"hidden up to {b} of 4",)),
        )
        for b in (1, 2)
    ),
    Family(
        "gradient coding, s = 1",
        ("gradient_coding",),
        AT_EVERY_STEP,
        Cell("free up to 1 dead, and exact", (f"{f.EXACT}, up to 1 of 4",)),
        (
            Cell("free up to 1", (f.NO_EFFECT,), kind="coded"),
            Cell(
                "free up to 1",
                (f.NO_EFFECT,),
                Short("who misses new parameters is a version behind and waits at the end", (f.LATE_STALL,)),
            ),
        ),
        Cell("hidden up to 1", ("hidden up to 1 of 4",)),
    ),
    Family(
        "bounded staleness (SSP)",
        ("ps(consistency=ssp(s=3))", "ps(consistency=bounded_delay(tau=4))"),
        Cell(
            AFTER_DRAIN.expected,
            (f.DRAINED,),
            NOT_ASKED_AGAIN,
        ),
        EVICTED,
        (Cell("that clock stalls", (f.STALLS,)),),
        Cell("free for s clocks, then s×", ("free for …",)),
    ),
    Family(
        "eager bounded staleness (ESSP)",
        ("ps(consistency=essp(s=3))",),
        AFTER_DRAIN,
        EVICTED,
        (
            Cell(
                "that clock stalls",
                (f.STALLS,),
                Short(
                    "nobody asks, so nobody waits: the next copy makes up for a lost one",
                    (f.UPDATE_LOST, f.CONTENT_LOST),
                ),
            ),
        ),
        Cell("free for s clocks, then s×", ("free for …",)),
    ),
    Family(
        "bounded values (VAP)",
        ("ps(consistency=value_bound(delta=0.001))",),
        Cell(
            AFTER_DRAIN.expected,
            (f.DRAINED, f.EVERY_STEP),
            NOT_ASKED_AGAIN,
        ),
        Cell("everyone waits at the bound, until it is taken out", (f.WAITS,)),
        (Cell("stalls", (f.STALLS,)),),
        Cell("free up to the bound, then s×", ("free for …", f.EVERYONE)),
    ),
    Family(
        "asynchronous server (Downpour, ASGD, MXNet)",
        ("asgd", "downpour"),
        ON_THE_SERVER,
        UNAFFECTED,
        (Cell("that update is lost; repeated until acknowledged", (f.UPDATE_LOST, f.NO_EFFECT), NO_REPEAT),),
        NONE,
    ),
    Family(
        "n-softsync",
        ("ps(consistency=softsync(n=1))",),
        ON_THE_SERVER,
        UNAFFECTED,
        (Cell("that update is lost; repeated until acknowledged", (f.UPDATE_LOST, f.NO_EFFECT), NO_REPEAT),),
        Cell("small", (f.FREE, f.PARTLY)),
    ),
    Family(
        "everyone to everyone (FAST)",
        ("broadcast",),
        AFTER_DRAIN,
        Cell("the others go on, and agree on what it had sent", (f.GOES_ON,)),
        (Cell("replicas no longer agree", (f.UPDATE_LOST,)),),
        NONE,
    ),
    Family(
        "partial, rest dropped",
        ("partial(rest='drop')",),
        Cell("never", (f.NEVER,)),
        UNAFFECTED,
        (Cell("the normal case", (f.UPDATE_LOST,)),),
        NONE,
    ),
    Family(
        "partial, rest deferred",
        ("partial",),
        AFTER_DRAIN,
        UNAFFECTED,
        (
            Cell(
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
        Cell("left out of the mean", SURVIVORS_GO_ON, NO_REPAIR),
        (Cell("these coordinates are skipped", (f.CONTENT_LOST,), NO_SKIP),),
        EVERYONE,
    ),
    Family(
        "D-PSGD",
        ("dpsgd",),
        AS_LR_FADES,
        Cell("the graph is rewired", (f.WAITS,)),
        (STALL,),
        Cell("diffuses to all", (f.SPREADS,)),
    ),
    Family(
        "AD-PSGD",
        ("adpsgd",),
        AS_LR_FADES,
        Cell("its partner gives it up", (f.WAITS, f.GOES_ON)),
        (
            Cell(
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
        Cell("its mass is lost, the others go on", (f.WAITS, f.GOES_ON)),
        (Cell("parameters and weight are lost together", (f.UPDATE_LOST,)),),
        Cell("out-peers wait", (f.SPREADS,)),
    ),
    Family(
        "GoSGD",
        ("gossip(p=0.5)",),
        AS_LR_FADES,
        Cell("its weight is lost, the others go on", (f.GOES_ON,)),
        (Cell("its weight is lost", (f.UPDATE_LOST,)),),
        NONE,
    ),
    Family(
        "elastic averaging (EASGD, EAMSGD, DeepSpark)",
        ("easgd(period=10)", "eamsgd", "deepspark"),
        NOT_AT_ONCE,
        UNAFFECTED,
        (
            Cell("the force acts on one side only", (f.CONTENT_LOST, f.UPDATE_LOST), kind="push"),
            Cell(
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
        (Cell("the force acts on one side only", (f.CONTENT_LOST, f.UPDATE_LOST)),),
        NONE,
    ),
    Family(
        "local SGD (SparkNet, BMUF, DiLoCo)",
        ("local_sgd", "local_sgd(period=6, outer_optimizer=nesterov)"),
        Cell("at every meeting", ("every …",)),
        Cell("the mean of the survivors", SURVIVORS_GO_ON, NO_REPAIR),
        (Cell("that round goes without it", (f.CONTENT_LOST, f.UPDATES_LOST), NO_SKIP),),
        Cell("free up to the meeting, then s×", ("free for …",)),
    ),
    Family(
        "Streaming DiLoCo",
        ("streaming_diloco(period=8, fragments=2, overlap=2)",),
        Cell("never all at once", (f.NEVER, f.DRAWN)),
        Cell("the mean of the survivors, by fragment", SURVIVORS_GO_ON, NO_REPAIR),
        (Cell("that fragment is not merged", (f.CONTENT_LOST, f.UPDATES_LOST), NO_SKIP),),
        Cell("hidden up to the overlap", ("free for …",)),
    ),
    Family(
        "MPCA-SGD",
        ("mpca",),
        Cell("never", (f.NEVER, f.DRAWN)),
        Cell("the tree gets another root", SURVIVORS_GO_ON, NO_REPAIR),
        (
            Cell(
                "that round is skipped",
                (f.CONTENT_LOST, f.NO_EFFECT),
                Short("the round never ends: everyone trains on, and waits at the end", (f.LATE_STALL,)),
            ),
        ),
        NONE,
    ),
)
"""All families of the failure table."""
