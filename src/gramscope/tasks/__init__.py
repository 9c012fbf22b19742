"""Data sets and models that ship with gramscope."""

from gramscope.tasks.digit_images import Task, digits, mlp
from gramscope.tasks.idx import label_encoded, mnist
from gramscope.tasks.models import cnn, recurrent, resnet18, transformer
from gramscope.tasks.modular_arithmetic import ModularTransformer, TokenTask, modular, modular_transformer
from gramscope.tasks.sequences import SequenceTask, flip_flop, line_attractor, memory_pro, parity
from gramscope.tasks.synthetic import SwissRoll, heaviside, swiss_roll, teacher_student

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
