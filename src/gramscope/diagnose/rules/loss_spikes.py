"""Single batches at which the loss jumps up."""

import numpy as np

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.rule_registry import LOSS, rule

HIGH = 8.0  # deviations above the running median
TIMES = 3.0  # and times it, unless they come at equal distances
SEVERAL = 3
WINDOW = 15
APART = 10  # batches between two of them, at least, where they come at equal distances


@rule("loss_spikes", needs=((("batch loss",), LOSS),), explains=("dead_units", "labels"), order=3)
def find(history: History) -> Finding | None:
    """Three batches or more whose loss lies 8 deviations above the median of the batches around, and above thrice it.

    Deviations are 1.48 times the median distance from the median, which single spikes do not move. And it lies above
    the first losses and that of the best constant outputs: where the loss is nearly gone, one hard example in a batch
    is many deviations and no harm. Thrice the median is not asked for where all distances are multiples of one: chance
    does not do that.
    """
    losses = history.batch_loss.finite
    if len(losses) < 3 * WINDOW:
        return None
    spikes, period = spike_places(losses.values, history.value("probe/chance"))
    if len(spikes) < SEVERAL or len(spikes) > len(losses) / 10:
        return None
    steps = losses.steps[spikes]
    return Finding(
        "loss_spikes",
        f"The loss jumps at {len(spikes)} single batches" + (f", every {period} steps." if period else "."),
        (Evidence("batches far above those around", float(len(spikes)), "above", SEVERAL - 1.0),),
        "Some batches are bad"
        + (": the same ones each time." if period else ", or the steps before them were too long."),
        f"Look at the batches of steps {', '.join(f'{s:.0f}' for s in steps[:4])}; leave out what is wrong in them, or "
        "clip gradients.",
        tuple(f"step {s:.0f}" for s in steps[:8]),
        float(steps[SEVERAL - 1]),
    )


def spike_places(values: np.ndarray, chance: float) -> tuple[np.ndarray, int]:
    """Places of values far above those around, and above chance where it is known; their distance, or 0."""
    padded = np.pad(values, WINDOW // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)
    least = float(np.fmax(np.median(values[:WINDOW]), chance))
    middle = np.median(windows, axis=1)
    deviation = 1.48 * np.median(np.abs(windows - middle[:, None]), axis=1)
    high = np.flatnonzero((values > middle + HIGH * deviation) & (values > least))
    gaps = np.diff(high)
    if len(high) >= SEVERAL and gaps.min() >= APART and not (gaps % gaps.min()).any():
        return high, int(gaps.min())
    return high[values[high] > TIMES * np.abs(middle[high])], 0
