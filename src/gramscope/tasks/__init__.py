"""Data sets and models that ship with gramscope."""

from gramscope.tasks.digits import Task, digits, mlp
from gramscope.tasks.idx import label_encoded, mnist
from gramscope.tasks.models import cnn, recurrent, resnet18, transformer
from gramscope.tasks.swiss_roll import SwissRoll, swiss_roll
from gramscope.tasks.synthetic import heaviside, teacher_student

__all__ = [
    "SwissRoll",
    "Task",
    "cnn",
    "digits",
    "heaviside",
    "label_encoded",
    "mlp",
    "mnist",
    "recurrent",
    "resnet18",
    "swiss_roll",
    "teacher_student",
    "transformer",
]
