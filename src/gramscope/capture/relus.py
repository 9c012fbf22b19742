"""The functions of torch that are a ReLU, as a torch function mode meets them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

RELUS: frozenset[Callable[..., Tensor]] = frozenset({F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_})
