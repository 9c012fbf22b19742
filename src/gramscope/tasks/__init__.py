"""Data sets and models that ship with gramscope."""

from typing import TYPE_CHECKING

from gramscope.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from gramscope.tasks.cifar import cifar10 as cifar10
    from gramscope.tasks.cifar import crop_and_flip as crop_and_flip
    from gramscope.tasks.cognitive import context_integration as context_integration
    from gramscope.tasks.cognitive import delayed_match as delayed_match
    from gramscope.tasks.cognitive import go_anti as go_anti
    from gramscope.tasks.cognitive import interval_timing as interval_timing
    from gramscope.tasks.cognitive import n_back as n_back
    from gramscope.tasks.digit_images import Task as Task
    from gramscope.tasks.digit_images import digits as digits
    from gramscope.tasks.digit_images import mlp as mlp
    from gramscope.tasks.equations import CausalTransformer as CausalTransformer
    from gramscope.tasks.equations import causal_transformer as causal_transformer
    from gramscope.tasks.equations import modular_equations as modular_equations
    from gramscope.tasks.greedy_training import GreedyRun as GreedyRun
    from gramscope.tasks.greedy_training import greedy_layerwise as greedy_layerwise
    from gramscope.tasks.idx import label_encoded as label_encoded
    from gramscope.tasks.idx import mnist as mnist
    from gramscope.tasks.image_networks import vgg16 as vgg16
    from gramscope.tasks.image_networks import wide_cnn as wide_cnn
    from gramscope.tasks.many_tasks import TaskBattery as TaskBattery
    from gramscope.tasks.many_tasks import battery as battery
    from gramscope.tasks.models import cnn as cnn
    from gramscope.tasks.models import recurrent as recurrent
    from gramscope.tasks.models import resnet18 as resnet18
    from gramscope.tasks.modular_arithmetic import ModularTransformer as ModularTransformer
    from gramscope.tasks.modular_arithmetic import TokenTask as TokenTask
    from gramscope.tasks.modular_arithmetic import modular as modular
    from gramscope.tasks.modular_arithmetic import modular_transformer as modular_transformer
    from gramscope.tasks.sequences import SequenceTask as SequenceTask
    from gramscope.tasks.sequences import flip_flop as flip_flop
    from gramscope.tasks.sequences import line_attractor as line_attractor
    from gramscope.tasks.sequences import memory_pro as memory_pro
    from gramscope.tasks.sequences import parity as parity
    from gramscope.tasks.step_function import StepFunction as StepFunction
    from gramscope.tasks.step_function import heaviside_step as heaviside_step
    from gramscope.tasks.synthetic import SwissRoll as SwissRoll
    from gramscope.tasks.synthetic import heaviside as heaviside
    from gramscope.tasks.synthetic import swiss_roll as swiss_roll
    from gramscope.tasks.synthetic import teacher_student as teacher_student

if not TYPE_CHECKING:  # so that a type checker knows every name and no other
    __getattr__, __dir__, __all__ = lazy_names(__name__)
