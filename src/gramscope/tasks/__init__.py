"""Data sets and models that ship with gramscope."""

from gramscope.tasks.digits import Task, digits, mlp
from gramscope.tasks.flip_flop import flip_flop
from gramscope.tasks.idx import label_encoded, mnist
from gramscope.tasks.line_attractor import line_attractor
from gramscope.tasks.memory_pro import memory_pro
from gramscope.tasks.models import cnn, recurrent, resnet18, transformer
from gramscope.tasks.modular import ModularTransformer, TokenTask, modular, modular_transformer
from gramscope.tasks.parity import parity
from gramscope.tasks.sequences import SequenceTask
from gramscope.tasks.swiss_roll import SwissRoll, swiss_roll
from gramscope.tasks.synthetic import heaviside, teacher_student

__all__ = [
    "ModularTransformer",
    "SequenceTask",
    "SwissRoll",
    "Task",
    "TokenTask",
    "cnn",
    "digits",
    "flip_flop",
    "heaviside",
    "label_encoded",
    "line_attractor",
    "memory_pro",
    "mlp",
    "mnist",
    "modular",
    "modular_transformer",
    "parity",
    "recurrent",
    "resnet18",
    "swiss_roll",
    "teacher_student",
    "transformer",
]
