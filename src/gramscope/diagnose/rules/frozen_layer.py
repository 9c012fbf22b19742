"""A layer that cannot train: its parameters are frozen, or no gradient reaches them."""

from gramscope.diagnose.finding import Evidence, Finding
from gramscope.diagnose.history import History
from gramscope.diagnose.rule_registry import MEASURES, rule

MOST = 0.5  # of all entries,
SEVERAL = 2  # in so many layers: a network that is mostly frozen is fine-tuned on purpose
TWICE = 3  # measurements at which the gradient must be exactly zero


@rule(
    "frozen_layer",
    needs=((("setup", "precision"), MEASURES),),
    explains=("head_only", "vanishing_signals", "lazy", "lr_too_small", "labels"),
    order=0,
)
def find(history: History) -> Finding | None:
    """Parameters with ``requires_grad=False`` in a network that otherwise trains, or whose gradient is exactly zero.

    Facts of the set-up, so no threshold is fitted. A network that is frozen as a whole is told so. Where more than half
    of all entries are frozen, in several layers, that is taken for fine-tuning (of a head, or of low-rank matrices
    beside the frozen ones). A zero gradient on the
    probe and in the batches, without a dead layer above it, means that the graph was cut (``detach``, ``no_grad``,
    ``.data``), or that the layer is not used. On the probe alone it means nothing: some layers act in training only.
    """
    if history.all_frozen:
        return Finding(
            "frozen_layer",
            "No layer can train: requires_grad is False for all parameters.",
            (Evidence("frozen/*", 1.0, "above", MOST),),
            "The parameters were frozen, by requires_grad_(False), or the model is only evaluated.",
            "If this is not meant, set requires_grad to True before the optimiser is made and before gs.watch.",
            tuple(history.family("frozen")),
            history.step_of(0),
        )
    frozen = {layer: s.last for layer, s in history.family("frozen").items() if s.last > 0}
    if frozen and not _fine_tuned(history, frozen):
        evidence = tuple(Evidence(f"frozen/{layer}", share, "above", 0.0) for layer, share in frozen.items())
        return Finding(
            "frozen_layer",
            f"Nothing is trained in {named(tuple(frozen))}: requires_grad is False there, while other layers train.",
            evidence[:4],
            "The parameters were frozen, by requires_grad_(False) or by a loop over the wrong names.",
            "If this is not meant, set requires_grad to True before the optimiser is made.",
            tuple(frozen),
            history.step_of(0),
        )
    cut = _without_gradient(history)
    if not cut:
        return None
    return Finding(
        "frozen_layer",
        f"No gradient reaches {named(cut)}: it is exactly zero at every measurement.",
        tuple(Evidence(f"gradient_norm/{layer}", 0.0, "equal to", 0.0) for layer in cut[:4]),
        "The graph is cut above it (detach, no_grad, .data, numpy), or the layer is not used.",
        "Look for detach() and no_grad() between this layer and the loss.",
        cut,
    )


def _fine_tuned(history: History, frozen: dict[str, float]) -> bool:
    """Several layers are frozen, and with them most of the entries."""
    part = sum(share * history.sizes.get(layer, 0) for layer, share in frozen.items())
    return len(frozen) >= SEVERAL and part > MOST * sum(history.sizes.values())


def _without_gradient(history: History) -> tuple[str, ...]:
    family, given = history.family("gradient_norm"), history.family("effective_lr")  # the latter where a batch gave one
    if any(series.last > 0.99 for series in history.family("dead_units").values()):
        return ()  # nothing flows back through a dead layer
    cut = [layer for layer, s in family.items() if len(s.finite) >= TWICE and not s.finite.values.any()]
    cut = [layer for layer in cut if layer not in given]
    return tuple(cut) if len(cut) < len(family) else ()


def named(layers: tuple[str, ...]) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {', '.join(layers[:4])}"
