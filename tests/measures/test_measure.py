"""The protocol: one rule for batches and ranks, warnings that say why."""

import math
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.measures.measure import Measure, State

CLASSES = [
    value
    for value in (getattr(gs.measures, name) for name in gs.measures.__all__)
    if isinstance(value, type) and issubclass(value, Measure) and value is not Measure
]
ARGUMENTS = {
    "Richness": lambda x, y, labels: (x, y),
    "CKA": lambda x, y, labels: (x, y),
    "KernelCKA": lambda x, y, labels: (x, y),
    "Alignment": lambda x, y, labels: (x, y),
    "TargetAlignment": lambda x, y, labels: (x, y),
    "Collapse": lambda x, y, labels: (x, labels),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_states_merge_and_survive_pickling(name):
    x, y, labels = torch.randn(24, 3), torch.randn(24, 3), torch.arange(24) % 3
    measure = getattr(gs.measures, name)()
    arguments = ARGUMENTS[name](x, y, labels)
    states = [measure.update(*(a[k::2] for a in arguments)) for k in range(2)]
    assert all(isinstance(state, State) for state in states)
    sent = pickle.loads(pickle.dumps(states[1]))
    merged, whole = measure.compute(measure.merge(states[0], sent)), measure(*arguments)
    if name == "Collapse":
        merged, whole = merged.nc1, whole.nc1
    assert merged == pytest.approx(whole, abs=1e-10)


def test_batches_may_be_tuples_dicts_or_single():
    x, y = torch.randn(8, 3), torch.randn(8, 2)
    measure = gs.measures.Richness()
    pairs = list(zip(x.split(3), y.split(3), strict=True))
    whole = measure(x, y)
    assert measure.over(pairs) == pytest.approx(whole, abs=1e-12)
    assert measure.over({"features": a, "outputs": b} for a, b in pairs) == pytest.approx(whole, abs=1e-12)


def test_ranks_merge_by_the_same_rule(tmp_path):
    """Two processes over gloo give the value of one, on both."""
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, torch, torch.distributed as dist, gramscope as gs
            rank = int(sys.argv[1])
            dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
            torch.manual_seed(0)
            x, labels = torch.randn(20, 4), torch.arange(20) % 3
            richness, collapse = gs.measures.Richness(), gs.measures.Collapse()
            mine = slice(0, 7) if rank == 0 else slice(7, 20)
            found = richness.compute(gs.measures.gather_state(richness.update(x[mine], x[mine, :2])))
            nc1 = collapse.compute(gs.measures.gather_state(collapse.update(x[mine], labels[mine]))).nc1
            assert abs(found - richness(x, x[:, :2])) < 1e-12, (found, richness(x, x[:, :2]))
            assert abs(nc1 / collapse(x, labels).nc1 - 1) < 1e-10
            dist.destroy_process_group()
            """
        )
    )
    meeting = str(tmp_path / "meeting")
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), meeting], stderr=subprocess.PIPE) for rank in (0, 1)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors.decode()


def test_an_unknown_measure_is_named():
    with pytest.raises(AttributeError, match="has no 'richnes'"):
        gs.measures.richnes  # noqa: B018
    assert set(gs.measures.__all__) <= set(dir(gs.measures))


def test_undefined_is_nan():
    with pytest.warns(gs.measures.UndefinedMeasureWarning, match="not defined"):
        assert math.isnan(gs.measures.cka(torch.ones(5, 1), torch.randn(5, 1)))


def test_states_of_another_measure_are_refused():
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    own, foreign = gs.measures.Richness().update(x, y), gs.measures.KernelCKA().update(x, y)
    for pair in ((foreign, own), (own, foreign), (foreign, foreign)):
        with pytest.raises(InputError, match=r"Richness merges states of its own \(LayerState\)"):
            gs.measures.Richness().merge(*pair)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_measure_knows_its_state(cls):
    assert isinstance(cls._kind_of_state, type)
    assert cls._kind_of_state is not State
