"""Computes 95 % bootstrap intervals, which quantify the uncertainty of every measurement in this project.

The resampled units are whole prompts, batches or repeats, because the steps within a unit are correlated. The random
seed is fixed, so that a report is reproducible.
"""

import dataclasses

import numpy as np

NUM_RESAMPLES = 2000  # bootstrap samples per interval


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A measurement with its 95 % interval; undefined numbers are nan."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        """Returns the fields for JSON, with None instead of nan."""
        return {name: None if np.isnan(value) else value for name, value in dataclasses.asdict(self).items()}


def resample(*num_units: int) -> tuple[np.ndarray, ...]:
    """Draws bootstrap samples for several kinds of units, such as prompts and repeats, independently of each other.

    Returns, for each P in `num_units`, the indices of units drawn with replacement, `[NUM_RESAMPLES, P]`.
    """
    rng = np.random.default_rng(0)
    return tuple(rng.integers(count, size=(NUM_RESAMPLES, count)) for count in num_units)


def resampled_weights(num_units: int) -> np.ndarray:
    """Returns how often each of P units occurs in each bootstrap sample, `[NUM_RESAMPLES, P]`."""
    (units,) = resample(num_units)
    weights = np.zeros(units.shape)
    np.add.at(weights, (np.arange(NUM_RESAMPLES)[:, None], units), 1)
    return weights


def estimate_from(value: float, resampled: np.ndarray) -> Estimate:
    """Makes an estimate from a measurement and its values in the bootstrap samples.

    Args:
        value: the statistic over all units.
        resampled: `[NUM_RESAMPLES]` the statistic of each bootstrap sample. Undefined values are nan and are ignored.

    Returns:
        The value, and the 2.5 % and 97.5 % quantiles of the samples.
    """
    # A bootstrap sample has no rate if none of its prompts has rounds.
    defined = resampled[~np.isnan(resampled)]
    low, high = np.quantile(defined, (0.025, 0.975)) if defined.size else (np.nan, np.nan)
    return Estimate(float(value), float(low), float(high))
