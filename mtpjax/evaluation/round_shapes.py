"""The shapes of rounds and their measured costs."""

import dataclasses
from typing import Any, NamedTuple


class RoundShape(NamedTuple):
    """The size of a round, given by its draft levels, tree width and verified nodes.

    `chain_shape` makes the shape of a chain. `PLAIN_STEP` is a round without drafts.
    """

    num_steps: int  # draft levels, K
    topk: int  # children per tree node; 1 for a chain
    num_nodes: int  # verified nodes, W, including the pending token


def chain_shape(num_steps: int) -> RoundShape:
    """Returns the shape of a chain of `num_steps` drafts; 0 is a plain step."""
    return RoundShape(num_steps, 1, num_steps + 1)


PLAIN_STEP = chain_shape(0)


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """Seconds per round of a batch, by shape.

    Attributes:
        batch: rows, B.
        verify: only the trunk's pass over the nodes.
        parts: drafting, including the extension over the tokens that the last round committed, and verification. They
            are timed together, since differences between timings are mostly noise.
        round: a whole round of `speculative_generate`, including acceptance and commit; empty if not measured.
        change: additional time of a round after a change of depth.
        draft: drafting alone, for drafters other than MTP modules; empty if not measured.
    """

    batch: int
    verify: dict[RoundShape, float]
    parts: dict[RoundShape, float]
    round: dict[RoundShape, float] = dataclasses.field(default_factory=dict)
    change: float = 0.0
    draft: dict[RoundShape, float] = dataclasses.field(default_factory=dict)

    @property
    def plain(self) -> float:
        """Seconds that the parts of a plain round take."""
        return self.parts[PLAIN_STEP]

    def ideal_ratio(self, accept_length: float, shape: RoundShape) -> float:
        """Computes `accept_length / parts`, the speed-up over plain decoding if a round cost only its parts.

        `accept_length` includes the bonus token, and `parts` is in units of a plain round.
        """
        return accept_length * self.plain / self.parts[shape]

    def to_json(self) -> dict[str, Any]:
        """Returns the costs as JSON values, with a row per shape, since JSON keys are strings."""
        rows = [
            {**shape._asdict(), **{f"{kind}_seconds": of[shape] for kind, of in self._kinds().items() if shape in of}}
            for shape in self.parts
        ]
        return {"batch": self.batch, "change_seconds": self.change, "rounds": rows}

    def _kinds(self) -> dict[str, dict[RoundShape, float]]:
        return {kind: getattr(self, kind) for kind in ("verify", "draft", "parts", "round")}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "RoundCosts":
        """Restores costs that `to_json` returned.

        Args:
            stored: the JSON object.

        Raises:
            KeyError, TypeError, ValueError: `stored` is not an object from `to_json`.
        """
        costs = cls(int(stored["batch"]), {}, {}, {}, float(stored["change_seconds"]))
        for row in stored["rounds"]:
            shape = RoundShape(row["num_steps"], row["topk"], row["num_nodes"])
            for kind, of in costs._kinds().items():
                if f"{kind}_seconds" in row:
                    of[shape] = float(row[f"{kind}_seconds"])
        return costs
