"""tanh and sigmoid units, or states of a recurrent layer, that sit where they are flat."""

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History, first_step
from gramscope.diagnose.progress import falls
from gramscope.diagnose.rule_registry import MEASURES, rule
from gramscope.diagnose.rules.depth import copies

MOST = 0.5  # of the entries of a layer
AT_START = 0.15  # before any training, where next to none should be


@rule(
    "saturated_units",
    needs=((("signal/*",), MEASURES),),
    explains=("vanishing_signals", "lr_too_small", "head_only", "exploding_signals", "lazy", "rank_collapse", "labels",
              "lr_too_large"),
    order=2,
)  # fmt: skip
def find(history: History) -> Finding | None:
    """Half of the entries of a layer have a slope below 6 % of the greatest (|tanh| above 0.97): gradients stop there.

    Or 15 % have so before any training: weights of the usual size leave next to none there. Glorot & Bengio 2010 found
    the same with sigmoids. Of recurrent layers the states are looked at, and the gates before training: trained gates
    may well be open or closed for good. Units that saturate while the probe's loss falls are left alone, as are those
    of the last layer (a sigmoid there says how sure the network is); units that are copies of one another are another
    finding (rank collapse). Flat units make the loss rough: where they were so before the steps grew too long, they are
    the cause.
    """
    learning = falls(history)
    full = {
        layer: (kind, s)
        for kind in ("saturated_gates", "saturated_units")
        for layer, s in history.family(kind).items()
        if len(s.finite) and ((s.last >= MOST and not learning) or min(s.first, s.last) >= AT_START)
    }
    full.pop(history.head or "", None)
    if not full or copies(history):
        return None
    worst = max(full, key=lambda layer: full[layer][1].last)
    kind, series = full[worst]
    units = "gates" if kind == "saturated_gates" else "units"
    return Finding(
        "saturated_units",
        f"{100 * series.last:.0f} % of the {units} of layer {worst} are saturated.",
        (Evidence(f"{kind}/{worst}", series.last, "above", MOST if series.first < AT_START else AT_START),),
        "Weights or inputs are too large for these units"
        + ("." if series.first >= AT_START else ", since a step that was too long."),
        "Initialise with smaller weights (Glorot), normalise the inputs, or put a normalisation layer before.",
        tuple(full),
        first_step(series, lambda values: values >= AT_START) or 0.0,
    )
