"""Data sets and models that ship with gramscope."""

from gramscope.tasks.digits import Task, digits, mlp

__all__ = ["Task", "digits", "mlp"]
