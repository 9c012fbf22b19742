"""What is no tensor, no Fields, no operator or no GlobalNTK gets an error of ours; the tests' own checks are off."""

from fresh import run_after_torch

SETTING = """
import numpy as np, torch
from torch import nn
import gramscope as gs
H, P, T = gs.hierarchy, gs.propagators, gs.theory
x, net = torch.ones(3, 2), nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
fields, rnn = H.Fields.from_module(net, x), nn.GRU(2, 3, batch_first=True)
g, matrix = P.GlobalNTK(rnn, torch.ones(2, 4, 2)), np.ones((3, 4))
for call in CALLS:
    try:
        eval(call)
    except gs.InputError as error:
        print(error)
"""

CALLS = {
    "gs.linearize(net, x)(x)": "a linearised model is called with a module, or with tensors by parameter name",
    "H.mean_projector(matrix)": "masks must be a torch.Tensor, got ndarray",
    "H.mean_projector(torch.ones(3, 4), [0, 0, 1], 'same')": "labels must be a torch.Tensor, got list",
    "H.class_metric(np.eye(4), torch.ones(3, 4))": "weight must be a torch.Tensor, got ndarray",
    "H.Fields(None, x)": "weights must be a list",
    "H.Fields([torch.ones(4, 2)], x, negative_slope='steep')": "negative_slope must be one finite number",
    "fields.shares(matrix)": "residual must be a torch.Tensor, got ndarray",
    "fields.pullback(1).apply(matrix)": "v must be a torch.Tensor, got ndarray",
    "H.predict_trajectory(net, x, 0.1, 2)": "fields must be Fields, got Sequential",
    "H.compare_reduced(net, x, 0.1, 2)": "fields must be Fields, got Sequential",
    "H.closure(net, x, 0.1)": "fields must be Fields, got Sequential",
    "gs.explain_step(net, x, x[:, :1], lr=0.1, optimizer=0.1)": "optimizer must be a torch optimiser",
    "P.participation_ratio(torch.eye(3))": "an operator must be a LinearOperator, got Tensor",
    "P.alignment(g.K, torch.eye(3))": "an operator must be a LinearOperator, got Tensor",
    "P.lyapunov_spectrum(rnn)": "g must be a GlobalNTK, got GRU",
    "P.kernel_rank(rnn)": "g must be a GlobalNTK, got GRU",
    "P.GlobalNTK(rnn, torch.ones(2, 4, 2), mask=[4, 2])": "mask must be a torch.Tensor, got list",
    "P.GlobalNTK(net, torch.ones(2, 4, 2), torch.ones(2, 2))": "a cell given with h0 must take (x_t, h)",
    "T.gaussian_moments('tanh', np.eye(2))": "kernel must be a torch.Tensor, got ndarray",
    "T.gaussian_moments('tanh', torch.eye(2), 'fine')": "tol must be one finite number",
    "T.FiniteWidthMLP(None)": "widths must be a list",
    "T.susceptibilities('tanh', None, 1.0)": "K must be one finite number at least 0",
}


def test_wrong_types_are_named():
    out, _ = run_after_torch(f"CALLS = {list(CALLS)!r}\n{SETTING}")
    for call, message, found in zip(CALLS, CALLS.values(), out.splitlines(), strict=True):
        assert found.startswith(message), call
