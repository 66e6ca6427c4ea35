"""Small moves that every part of a drill shares: its fields, its figures, its orders, and its marks on trainers."""

from powerguard.core.actions import Action, EnsurePolicy, Scalar
from powerguard.core.frozen import replace
from powerguard.core.model import Drill, DrillOrder, Trainer
from powerguard.core.turn import Turn


def change(turn: Turn, **changes: object) -> None:
    """Change fields of the drill that runs."""
    if turn.state.drill is not None:
        turn.update(drill=replace(turn.state.drill, **changes))  # type: ignore[arg-type]


def figure(turn: Turn, **figures: Scalar) -> None:
    """Enter figures; what is not known is left out."""
    drill = turn.state.drill
    if drill is not None:
        known = dict(drill.figures) | {name: value for name, value in figures.items() if value is not None}
        change(turn, figures=tuple(known.items()))


def is_recorded(drill: Drill) -> bool:
    """Say whether this drill only records: in dry-run no trainer is asked."""
    return dict(drill.figures).get("dry_run") is True


def find(turn: Turn, name: str) -> Trainer | None:
    """Return a trainer by its name; None when it is not known any more."""
    return next((trainer for trainer in turn.state.trainers if trainer.name == name), None)


def mark(turn: Turn, name: str, **changes: object) -> None:
    """Change fields of one trainer."""
    turn.update(
        trainers=tuple(
            replace(t, **changes) if t.name == name else t  # type: ignore[arg-type]
            for t in turn.state.trainers
        )
    )


def order(turn: Turn, kind: type[Action], what: str, *, limit_s: float, trainer: str = "", **fields: object) -> str:
    """Order something in the drill's name and wait for its outcome. what: of `drill.ORDERS`."""
    drill = turn.state.drill
    if trainer:
        fields["trainer"] = trainer
    # Where always-on is set for an outage alone, a drill must not set it: nothing would ever put it back.
    outage = "" if drill is None or kind is EnsurePolicy else drill.id
    id_ = turn.order(kind, limit_s=limit_s, outage=outage, **fields)
    if drill is not None:
        waits = DrillOrder(id=id_, what=what, by_s=turn.now_s + limit_s, trainer=trainer)
        change(turn, waiting=(*drill.waiting, waits))
    return id_


def rounded(value: float | None) -> float | None:
    """Four decimals: enough for a share, and for seconds."""
    return None if value is None else round(value, 4)
